"""Advantages compared with plain loops from the papers, and their common properties."""

from __future__ import annotations

import math
import statistics

import pytest
import torch

import rlsdk
from rlsdk.batch import Credit, CreditInputs
from rlsdk.components import component_of
from rlsdk.errors import MissingFieldError
from rlsdk.testing.inputs import select

ALL = rlsdk.names("advantage")
BY_GROUP = ["grpo", "rloo", "opo", "gpg", "pass_at_k", "opmd", "asymre", "rec"]


def on_tokens(x: CreditInputs, result) -> torch.Tensor:
    """Advantages `[t]`, zero where nothing was sampled."""
    values = result.advantages if isinstance(result, Credit) else result
    values = x.per_token(values) if len(values) == len(x.rewards) else values
    return torch.where(x.loss_mask, values, 0)


def run(name: str, x: CreditInputs, **options) -> torch.Tensor:
    return on_tokens(x, rlsdk.load("advantage", name, **options)(x))


class Row:
    """One rollout as lists."""

    def __init__(self, x: CreditInputs, i: int) -> None:
        where = (x.segments == i).nonzero()[:, 0].tolist()
        self.group, self.reward = int(x.groups[i]), float(x.rewards[i])
        self.mask = [bool(x.loss_mask[t]) for t in where]
        for name in ("values", "logprobs", "ref_logprobs", "probs_squared_sum", "token_rewards"):
            if hasattr(x, name):
                setattr(self, name, [float(getattr(x, name)[t]) for t in where])
        for name in ("baseline_rewards", "trajectories", "steps", "states"):
            setattr(self, name, float(getattr(x, name)[i]))
        self.parts = {name: float(part[i]) for name, part in x.reward_parts.items()}
        self.places = [t for t, sampled in enumerate(self.mask) if sampled]
        self.rewards = [0.0] * len(self.mask)
        if hasattr(x, "token_rewards"):
            self.rewards = [r if m else 0.0 for r, m in zip(self.token_rewards, self.mask, strict=True)]
        elif self.places:
            self.rewards[self.places[-1]] = self.reward

    def spread(self, by_place) -> list[float]:
        out = [0.0] * len(self.mask)
        for t, value in zip(self.places, by_place, strict=True):
            out[t] = value
        return out


def rows_of(x: CreditInputs) -> list[Row]:
    return [Row(x, i) for i in range(len(x.rewards))]


def peers(rows, row, key=lambda r: r.group):
    return [r for r in rows if key(r) == key(row)]


def std(values):
    return statistics.stdev(values) if len(values) > 1 else 0.0


def centred(row, rows, value=lambda r: r.reward, std_normalize=False):
    values = [value(r) for r in rows]
    if len(set(values)) == 1:
        return 0.0
    difference = value(row) - sum(values) / len(values)
    return difference / (std(values) + 1e-6) if std_normalize else difference


def ref_grpo(rows, row):
    return centred(row, peers(rows, row), std_normalize=True)


def ref_grpo_batch(rows, row):
    return centred(row, peers(rows, row)) / (std([r.reward for r in rows]) + 1e-6)


def ref_gdpo(rows, row):
    def part(r, name):
        return centred(r, peers(rows, r), lambda p: p.parts[name], std_normalize=True)

    def total(r):
        return part(r, "format") + 0.5 * part(r, "length")

    return total(row) / (std([total(r) for r in rows]) + 1e-6)


def ref_rloo(rows, row):
    others = [r.reward for r in peers(rows, row) if r is not row]
    return row.reward - sum(others) / len(others) if others else 0.0


def ref_opo(rows, row):
    group = peers(rows, row)
    total = sum(len(r.places) for r in group)
    return row.reward - sum(len(r.places) * r.reward for r in group) / total if total else 0.0


def ref_gpg(rows, row):
    useful = [r for r in rows if len({p.reward for p in peers(rows, r)}) > 1]
    return len(rows) / len(useful) * centred(row, peers(rows, row))


def ref_pass_at_k(rows, row):
    rewards = sorted((r.reward for r in peers(rows, row)), reverse=True)
    if len(rewards) < 2 or row.reward != rewards[0] or rewards[0] == rewards[1]:
        return 0.0
    return (rewards[0] - rewards[1]) / (std(rewards) + 1e-6)


def ref_logavgexp(rows, row):
    group = peers(rows, row)
    return row.reward - 0.5 * math.log(sum(math.exp(r.reward / 0.5) for r in group) / len(group))


def ref_asymre(rows, row):
    group = peers(rows, row)
    return centred(row, group) + 0.1 if len({r.reward for r in group}) > 1 else 0.0


def ref_rec_balance(rows, row):
    group = peers(rows, row)
    mean = sum(r.reward for r in group) / len(group)
    good = [r for r in group if r.reward >= mean or len({p.reward for p in group}) == 1]
    kept = good + [r for r in group if r not in good][: len(good)]
    return centred(row, kept) if row in kept else 0.0


def to_go(row, gamma, rewards=None):
    later, out = 0.0, []
    for t in reversed(row.places):
        later = (rewards or row.rewards)[t] + gamma * later
        out.insert(0, later)
    return out


def ref_gae(rows, row, gamma=0.9, lam=0.8):
    advantage, following, out = 0.0, 0.0, []
    for t in reversed(row.places):
        delta = row.rewards[t] + gamma * following - row.values[t]
        advantage, following = delta + gamma * lam * advantage, row.values[t]
        out.insert(0, advantage)
    return out


def ref_remax(rows, row):
    return [g - row.baseline_rewards for g in to_go(row, 1.0)]


def ref_distill(rows, row):
    return [2 * (row.ref_logprobs[t] - row.logprobs[t]) for t in row.places]


def turns(row):
    runs = []
    for t in row.places:
        if runs and runs[-1][-1] == t - 1:
            runs[-1].append(t)
        else:
            runs.append([t])
    return runs


def ref_segments(rows, row):
    later, out = 0.0, []
    for run_ in reversed(turns(row)):
        later = sum(row.rewards[t] for t in run_) + 0.5 * later
        out = [later] * len(run_) + out
    return out


def weights(row):
    out, total = [], 0.0
    for t in row.places:
        total += 1 - 2 * math.exp(row.logprobs[t]) + row.probs_squared_sum[t]
        out.append(total)
    return out


def ref_otb(rows, row):
    own, out = to_go(row, 1.0), []
    for j in range(len(row.places)):
        there = [r for r in peers(rows, row) if len(r.places) > j]
        total = sum(weights(r)[j] for r in there)
        out.append(own[j] - sum(to_go(r, 1.0)[j] * weights(r)[j] for r in there) / total)
    return out


def trajectories(rows):
    found = {}
    for r in rows:
        found.setdefault((r.group, r.trajectories), []).append(r)
    return found


def of_trajectory(rows, row, value, std_normalize):
    """A trajectory's value against its group, every trajectory once."""
    all_ = trajectories(rows)
    values = [value(steps) for (group, _), steps in all_.items() if group == row.group]
    own = value(all_[row.group, row.trajectories])
    if len(set(values)) == 1:
        return 0.0
    return (own - sum(values) / len(values)) / ((std(values) + 1e-6) if std_normalize else 1)


def ref_step_broadcast(rows, row):
    last = of_trajectory(rows, row, lambda steps: max(steps, key=lambda r: r.steps).reward, True)
    return last / len(trajectories(rows)[row.group, row.trajectories])


def ref_step_by_step(rows, row):
    return centred(row, peers(rows, row, lambda r: (r.group, r.steps)), std_normalize=True)


def ref_gigpo(rows, row):
    def step_return(r):
        after = [s for s in trajectories(rows)[r.group, r.trajectories] if s.steps >= r.steps]
        return sum(0.9**k * s.reward for k, s in enumerate(sorted(after, key=lambda s: s.steps)))

    episode = of_trajectory(rows, row, lambda steps: sum(r.reward for r in steps), True)
    anchors = peers(rows, row, lambda r: (r.group, r.states))
    return episode + 0.5 * centred(row, anchors, step_return, std_normalize=True)


CASES = [
    ("grpo", {}, ref_grpo),
    ("grpo", {"std_normalize": False}, lambda rows, row: centred(row, peers(rows, row))),
    ("grpo", {"std_over": "batch"}, ref_grpo_batch),
    ("gdpo", {}, ref_gdpo),
    ("rloo", {}, ref_rloo),
    ("opo", {}, ref_opo),
    ("gpg", {}, ref_gpg),
    ("pass_at_k", {}, ref_pass_at_k),
    ("opmd", {}, lambda rows, row: centred(row, peers(rows, row))),
    ("opmd", {"baseline": "logavgexp", "tau": 0.5}, ref_logavgexp),
    ("asymre", {}, ref_asymre),
    ("rec", {"std_normalize": True}, ref_grpo),
    ("rec", {"drop": "balance"}, ref_rec_balance),
    ("constant", {"value": 2.0}, lambda rows, row: 2.0),
    ("gae", {"gamma": 0.9, "lam": 0.8, "whiten": False}, ref_gae),
    ("gae", {"whiten": False}, lambda rows, row: ref_gae(rows, row, 1.0, 1.0)),
    ("remax", {}, ref_remax),
    ("on_policy_distill", {"coef": 2.0}, ref_distill),
    ("segment_returns", {"gamma": 0.5}, ref_segments),
    ("optimal_token_baseline", {}, ref_otb),
    ("step_grpo", {"divide_by_steps": True}, ref_step_broadcast),
    ("step_grpo", {"credit": "step"}, ref_step_by_step),
    ("gigpo", {"omega": 0.5, "gamma": 0.9, "std_normalize": True}, ref_gigpo),
]


@pytest.mark.parametrize("name, options, reference", CASES, ids=[f"{n}-{o}" for n, o, _ in CASES])
@pytest.mark.parametrize("token_rewards", [False, True])
@pytest.mark.parametrize("seed", range(3))
def test_parity_with_plain_loops(make_credit, name, options, reference, token_rewards, seed):
    x = make_credit(seed, 13, token_rewards=token_rewards)
    found, rows = run(name, x, **options), rows_of(x)
    expected = []
    for row in rows:
        value = reference(rows, row)
        expected += row.spread(value if isinstance(value, list) else [value] * len(row.places))
    assert found.tolist() == pytest.approx(expected, abs=1e-9)


def whitened(values: list[float]) -> list[float]:
    mean, variance = sum(values) / len(values), statistics.variance(values)
    return [(v - mean) / math.sqrt(variance + 1e-8) for v in values]


@pytest.mark.parametrize("name", ["reinforce_plus_plus", "gae"])
def test_equal_rewards_are_whitened_to_exactly_zero(name: str) -> None:
    """The mean of equal numbers is rounded, and the remaining difference must not be scaled up to advantages."""
    for seed in range(50):
        generator = torch.Generator().manual_seed(seed)
        lengths = torch.randint(1, 30, (64,), generator=generator)
        total = int(lengths.sum())
        rewards = torch.rand((), generator=generator).expand(64)
        mask, zeros = torch.ones(total, dtype=torch.bool), torch.zeros(total)
        x = rlsdk.CreditInputs(rewards, torch.arange(64), lengths, mask, values=zeros)
        assert rlsdk.load("advantage", name)(x).advantages.abs().max() == 0


@pytest.mark.parametrize("token_rewards", [False, True])
def test_whitened_ones(make_credit, token_rewards):
    x = make_credit(5, token_rewards=token_rewards)
    rows = rows_of(x)
    plain = {
        "gae": [a for row in rows for a in ref_gae(rows, row, 1.0, 1.0)],
        "reinforce_plus_plus": [g for row in rows for g in to_go(row, 1.0)],
        "reinforce_plus_plus_baseline": [centred(row, peers(rows, row)) for row in rows for _ in row.places],
        "segment_returns": [g for row in rows for run_ in [to_go(row, 1.0)] for g in run_],
    }
    plain["segment_returns"] = []
    for row in rows:
        later, out = 0.0, []
        for run_ in reversed(turns(row)):
            later += sum(row.rewards[t] for t in run_)
            out = [later] * len(run_) + out
        plain["segment_returns"] += out
    for name, values in plain.items():
        options = {"whiten": True} if name == "segment_returns" else {}
        found = run(name, x, **options)[x.loss_mask].tolist()
        assert found == pytest.approx(whitened(values), abs=1e-9), name


def test_returns_for_a_critic(make_credit):
    x = make_credit(2)
    plain = rlsdk.load("advantage", "gae", gamma=0.9, lam=0.7, whiten=False)(x)
    white = rlsdk.load("advantage", "gae", gamma=0.9, lam=0.7)(x)
    expected = torch.where(x.loss_mask, plain.advantages + x.values, 0)
    assert torch.allclose(plain.returns, expected) and torch.equal(white.returns, plain.returns)


def by_hand(rewards, groups, **options) -> CreditInputs:
    n = len(rewards)
    return CreditInputs.from_padded(
        torch.tensor(rewards), torch.ones(n, 2).bool(), torch.tensor(groups), lengths=torch.tensor([2] * n), **options
    )


@pytest.mark.parametrize(
    "name, options, expected",
    [
        ("grpo", {}, [0.70711, -0.70711, 0.0, 0.0]),
        ("grpo", {"std_normalize": False}, [0.5, -0.5, 0.0, 0.0]),
        ("rloo", {}, [1.0, -1.0, 0.0, 0.0]),
        ("opo", {}, [0.5, -0.5, 0.0, 0.0]),
        ("gpg", {}, [1.0, -1.0, 0.0, 0.0]),
        ("pass_at_k", {}, [1.41421, 0.0, 0.0, 0.0]),
        ("pass_at_k", {"std_normalize": False}, [1.0, 0.0, 0.0, 0.0]),
        ("opmd", {}, [0.5, -0.5, 0.0, 0.0]),
        ("asymre", {}, [0.6, -0.4, 0.0, 0.0]),
        ("rec", {}, [0.5, -0.5, 0.0, 0.0]),
        ("reinforce_plus_plus_baseline", {}, [1.14564 + 0.0, -1.14564, 0.0, 0.0]),
        ("constant", {}, [1.0, 1.0, 1.0, 1.0]),
    ],
)
def test_hand_computed(name, options, expected):
    x = by_hand([1.0, 0.0, 0.7, 0.7], [0, 0, 1, 1])
    if name == "reinforce_plus_plus_baseline":  # eight tokens: two of 0.5, two of -0.5, four of 0; variance 1/7
        expected = [0.5 * math.sqrt(7), -0.5 * math.sqrt(7), 0.0, 0.0]
        expected = [v / math.sqrt(1.0) for v in expected]
    assert run(name, x, **options).tolist() == pytest.approx([e for e in expected for _ in range(2)], abs=1e-4)


def test_hand_computed_returns_over_a_gap():
    mask = torch.tensor([[True, True, False, True, False]])
    values = torch.tensor([[0.5, 0.25, 9.0, 0.75, 9.0]])
    x = CreditInputs.from_padded(torch.tensor([1.0]), mask, torch.tensor([0]), values=values)
    # From the end: δ = 1 - 0.75; δ = 0.5·0.75 - 0.25; δ = 0.5·0.25 - 0.5, each after it at 0.5.
    assert run("gae", x, gamma=0.5, whiten=False).tolist() == pytest.approx([-0.25, 0.25, 0.0, 0.25])
    assert run("gae", x, whiten=False).tolist() == pytest.approx([0.5, 0.75, 0.0, 0.25])
    discounted = rlsdk.load("advantage", "reinforce_plus_plus", gamma=0.5)(x).returns
    assert discounted.tolist() == [0.25, 0.5, 0.0, 1.0]


def test_gae_is_exact_without_discount():
    """With γ = λ = 1 the critic's later values must cancel to the last bit, over thousands of tokens."""
    length = 5000
    values = 1e4 * torch.randn(1, length)
    x = CreditInputs.from_padded(torch.tensor([1.0]), torch.ones(1, length).bool(), torch.tensor([0]), values=values)
    credit = rlsdk.load("advantage", "gae", whiten=False)(x)
    assert torch.equal(credit.returns, torch.ones(length))
    assert torch.equal(credit.advantages, 1 - values[0])


def test_grpo_keeps_digits_with_a_large_mean():
    """The one-pass variance of verl's grpo_vectorized gives ±150 here."""
    x = by_hand([1000.1, 999.9, 1000.1, 999.9], [0] * 4)
    assert run("grpo", x).abs().tolist() == pytest.approx([0.866] * 8, abs=1e-2)


@pytest.mark.parametrize("name", BY_GROUP)
@pytest.mark.parametrize("reward", [0.1, 1 / 3, -7.7])
def test_degenerate_groups_have_exactly_zero_advantage(name, reward):
    x = by_hand([reward] * 7 + [0.3], [0] * 3 + [1] * 4 + [2])
    assert run(name, x).tolist() == [0.0] * 16


@pytest.mark.parametrize("name", ALL)
def test_finite_on_every_degenerate_batch(make_credit, name):
    part = make_credit(1, 4)  # a group of one and a group of equals
    assert run(name, part).isfinite().all()
    empty = make_credit(1, 4).replace(loss_mask=torch.zeros_like(part.loss_mask))
    assert run(name, empty).tolist() == [0.0] * len(part.loss_mask)


@pytest.mark.parametrize("name", ALL)
def test_nothing_at_all(make_credit, name):
    x = make_credit(0)
    result = rlsdk.load("advantage", name)(select(x, []))
    assert len(result.advantages if isinstance(result, Credit) else result) == 0


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("token_rewards", [False, True])
def test_garbage_where_nothing_was_sampled_does_not_leak(make_credit, name, token_rewards):
    x = make_credit(3, token_rewards=token_rewards)
    dirty = {}
    for key in ("values", "logprobs", "ref_logprobs", "entropy", "probs_squared_sum", "token_rewards"):
        if hasattr(x, key):
            dirty[key] = torch.where(x.loss_mask, getattr(x, key), torch.nan)
    assert torch.equal(run(name, x), run(name, x.replace(**dirty)))


@pytest.mark.parametrize("name", [n for n in ALL if n != "rec"])
@pytest.mark.parametrize("token_rewards", [False, True])
def test_the_order_of_rollouts_does_not_matter(make_credit, name, token_rewards):
    x = make_credit(4, token_rewards=token_rewards)
    order = torch.randperm(len(x.rewards), generator=torch.Generator().manual_seed(0))
    tokens = torch.cat([(x.segments == i).nonzero()[:, 0] for i in order])
    assert torch.allclose(run(name, select(x, order.tolist())), run(name, x)[tokens], atol=1e-12)


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_lower_precision(make_credit, name, dtype):
    low, high = run(name, make_credit(6, dtype=dtype)), run(name, make_credit(6))
    assert low.dtype == torch.float32
    if dtype == torch.float32:
        assert torch.allclose(low.double(), high, atol=1e-4)
    assert low.isfinite().all()


def test_a_score_that_rollouts_of_a_trajectory_share_counts_once_in_its_total():
    mask, rewards = torch.ones(4, 1), torch.tensor([1.0, 1.0, 1.0, 0.0])  # a right trajectory of three, a wrong of one
    own = {"trajectories": torch.tensor([0, 0, 0, 1]), "steps": torch.tensor([0, 1, 2, 0]), "states": torch.arange(4)}
    shared = torch.tensor([True, True, False, False])
    x = CreditInputs.from_padded(rewards, mask, torch.zeros(4), shared_scores=shared, **own)
    gigpo = rlsdk.load("advantage", "gigpo")
    assert gigpo(x).tolist() == [0.5, 0.5, 0.5, -0.5]
    assert gigpo(x.replace(shared_scores=None)).tolist() == [1.5, 1.5, 1.5, -1.5]  # each was scored
    lost = x.replace(shared_scores=torch.tensor([True, True, True, False]))  # the last rollout sampled nothing
    assert gigpo(lost).tolist() == [0.5, 0.5, 0.5, -0.5]


@pytest.mark.parametrize("name", ALL)
def test_only_declared_fields_are_read(make_credit, name):
    x, advantage = make_credit(0), rlsdk.load("advantage", name)
    needs = component_of(advantage).needs
    assert torch.equal(on_tokens(x, advantage(x.only(needs))), run(name, x))
    for field in needs:
        with pytest.raises(MissingFieldError, match=field):
            advantage(x.only(needs).replace(**{field: None}))


@pytest.mark.parametrize("name", ["grpo", "rloo", "opo", "gae", "reinforce_plus_plus"])
def test_packed_or_padded(make_credit, name):
    x = make_credit(7)
    planes = {k: x.to_padded(getattr(x, k)) for k in ("values",)}
    y = CreditInputs.from_padded(x.rewards, x.to_padded(x.loss_mask), x.groups * 5, lengths=x.lengths, **planes)
    assert torch.equal(run(name, y), run(name, x))


def with_parts(weights: dict[str, float], **parts: list[float]) -> CreditInputs:
    """Two groups of two, whose rewards are the weighted sums of their parts."""
    rewards = [sum(weights[name] * part[i] for name, part in parts.items()) for i in range(4)]
    x = by_hand(rewards, [0, 0, 1, 1])
    return x.replace(reward_parts={k: torch.tensor(v) for k, v in parts.items()}, reward_weights=weights)


def test_gdpo_tells_apart_what_equal_sums_hide():
    """The sums of group 0 are equal; normalised, `right` gives ±0.70711 and `form` ∓0.70711, of which a half counts.

    S is ±0.35355 in group 0 and 0 in group 1, whose parts are constant: its standard deviation is 0.28868.
    """
    x = with_parts({"right": 1.0, "form": 0.5}, right=[1.0, 0.0, 1.0, 1.0], form=[0.0, 2.0, 0.0, 0.0])
    assert run("grpo", x).tolist() == [0.0] * 8
    expected = [1.224745, 1.224745, -1.224745, -1.224745]
    assert run("gdpo", x).tolist() == pytest.approx([*expected, 0, 0, 0, 0], abs=1e-4)


@pytest.mark.parametrize("scale", [1e-3, 1.0, 1e6])
def test_the_scale_of_a_part_does_not_change_gdpo(scale):
    parts = {"right": [1.0, 0.0, 1.0, 0.0], "form": [0.0, 1.0, 1.0, 0.0]}
    plain = with_parts({"right": 1.0, "form": 0.5}, **parts)
    scaled = with_parts({"right": 1.0, "form": 0.5}, **{**parts, "right": [scale * v for v in parts["right"]]})
    assert run("gdpo", scaled).tolist() == pytest.approx(run("gdpo", plain).tolist(), rel=5e-3)


def test_gdpo_of_one_part_is_grpo_with_the_spread_of_the_batch():
    x = with_parts({"right": 3.0}, right=[1.0, 0.0, 0.25, 0.75])
    normalised = run("grpo", x)
    assert torch.allclose(run("gdpo", x), normalised / (normalised[::2].std() + 1e-6), atol=1e-5)


@pytest.mark.parametrize("reward", [0.1, 1 / 3, -7.7])
def test_gdpo_is_exactly_zero_where_no_part_differs(reward):
    x = with_parts({"a": 1.0, "b": 0.3}, a=[reward] * 4, b=[reward, reward, 0.3, 0.3])
    assert run("gdpo", x).tolist() == [0.0] * 8


def test_a_part_that_applied_to_no_task_of_the_batch_adds_nothing_to_gdpo():
    x = with_parts({"right": 1.0}, right=[1.0, 0.0, 0.0, 1.0])
    more = x.replace(reward_weights={"code": 2.0, "right": 1.0})
    assert torch.equal(run("gdpo", more), run("gdpo", x))
