"""Policy losses compared with plain loops from the papers, by value and gradient, and their common properties."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

import rlsdk
from rlsdk.batch import AGGREGATIONS, LossInputs, Totals, aggregate
from rlsdk.components import component_of
from rlsdk.errors import MissingFieldError

ALL = rlsdk.names("policy_loss")
RANDOM_CHOICE = {"clip_cov": {"ratio": 1.0, "cov_low": -9.0, "cov_high": 9.0}}  # all candidates: nothing left to chance


def run(name: str, x: LossInputs, **options) -> Tensor:
    result = rlsdk.load("policy_loss", name, **options)(x)
    return result[0] if isinstance(result, tuple) else result


def value_and_gradient(name: str, x: LossInputs, **options) -> tuple[Tensor, Tensor]:
    """Loss `[t]`, zero where untrained, and the gradient of an uneven sum of it."""
    logprobs = x.logprobs.clone().requires_grad_()
    loss = torch.where(x.loss_mask, run(name, x.replace(logprobs=logprobs), **options), 0)
    (loss * torch.linspace(0.5, 2, len(loss), dtype=loss.dtype)).sum().backward()
    return loss.detach(), logprobs.grad


def clip(value, low, high):
    return min(max(value, low), high)


def scalar_ppo(logp, old, adv, low, high, dual):
    """PPO's loss of one token and its derivative by the logprob."""
    ratio = math.exp(clip(logp - old, -20, 20))
    loss, slope = -adv * ratio, -adv * ratio
    clipped = -adv * clip(ratio, 1 - low, 1 + high)
    if clipped > loss:
        loss, slope = clipped, 0.0
    if dual is not None and adv < 0 and loss > -adv * dual:
        loss, slope = -adv * dual, 0.0
    return loss, slope


class Rollout:
    """One rollout's trained tokens as lists, and where they stand."""

    def __init__(self, x: LossInputs, i: int) -> None:
        self.index = i
        self.places = [t for t in (x.segments == i).nonzero()[:, 0].tolist() if x.loss_mask[t]]
        for name in ("logprobs", "old_logprobs", "behaviour_logprobs", "ref_logprobs", "advantages"):
            setattr(self, name, [float(getattr(x, name)[t]) for t in self.places])
        self.preferred, self.pair, self.expert = bool(x.preferred[i]), int(x.pairs[i]), bool(x.expert[i])

    @property
    def delta(self):
        return [p - q for p, q in zip(self.logprobs, self.old_logprobs, strict=True)]

    @property
    def gain(self):
        return sum(self.logprobs) - sum(self.ref_logprobs)


def per_token(rule):
    """A reference that returns, for each token alone, (loss, its derivative by the token's logprob)."""

    def reference(rollouts):
        fields = [(r.logprobs, r.old_logprobs, r.behaviour_logprobs, r.advantages) for r in rollouts]
        return [[rule(*token) for token in zip(*each, strict=True)] for each in fields]

    return reference


def ref_sapo(p, q, m, a):
    ratio = math.exp(p - q)
    tau = 1.0 if a > 0 else 1.05
    gate = 1 / (1 + math.exp(-tau * (ratio - 1)))
    return -a * 4 / tau * gate, -a * 4 * gate * (1 - gate) * ratio


def ref_cispo(low, high):
    def rule(p, q, m, a):
        weight = clip(math.exp(p - q), 1 - low, 1 + high)
        return -weight * a * p, -weight * a

    return rule


def ref_decoupled(p, q, m, a):
    weight = math.exp(q - m)
    return tuple(weight * v for v in scalar_ppo(p, q, a, 0.1, 0.1, None))


def ref_topr(rollouts):
    out = []
    for r in rollouts:
        ratio = math.exp(sum(p - m for p, m in zip(r.logprobs, r.behaviour_logprobs, strict=True)))
        weights = [1.0 if a > 0 else min(ratio, 1.0) for a in r.advantages]
        out.append([(-w * a * p, -w * a) for w, a, p in zip(weights, r.advantages, r.logprobs, strict=True)])
    return out


def ref_gspo(rollouts):
    """The detached ratio of the sequence; the gradient of each token goes through its own logprob."""
    out = []
    for r in rollouts:
        ratio = math.exp(sum(r.delta) / len(r.delta)) if r.delta else 1.0
        out.append([scalar_ppo(math.log(ratio), 0.0, a, 0.05, 0.1, None) for a in r.advantages])
    return out


CASES = [
    ("ppo", {}, per_token(lambda p, q, m, a: scalar_ppo(p, q, a, 0.2, 0.2, 3.0))),
    ("ppo", {"clip_high": 0.28, "dual_clip": None}, per_token(lambda p, q, m, a: scalar_ppo(p, q, a, 0.2, 0.28, None))),
    ("ppo", {"clip_low": 0.9, "clip_high": 9.0, "dual_clip": 1.3},
     per_token(lambda p, q, m, a: scalar_ppo(p, q, a, 0.9, 9.0, 1.3))),
    ("decoupled_ppo", {"clip_low": 0.1, "clip_high": 0.1}, per_token(ref_decoupled)),
    ("reinforce", {}, per_token(lambda p, q, m, a: (-a * p, -a))),
    ("gpg", {}, per_token(lambda p, q, m, a: (-a * p, -a))),
    ("sft", {}, per_token(lambda p, q, m, a: (-p, -1.0))),
    ("opmd", {"tau": 3.0}, per_token(lambda p, q, m, a: (-a * p / 4, -a / 4))),
    ("cispo", {}, per_token(ref_cispo(1.0, 0.28))),
    ("cispo", {"clip_low": 0.1, "clip_high": 0.1}, per_token(ref_cispo(0.1, 0.1))),
    ("tis", {"cap": 0.9}, per_token(ref_cispo(1.0, -0.1))),
    ("sapo", {}, per_token(ref_sapo)),
    ("topr", {}, ref_topr),
    ("gspo", {"clip_low": 0.05, "clip_high": 0.1}, ref_gspo),
    ("gspo_token", {"clip_low": 0.05, "clip_high": 0.1}, ref_gspo),
]  # fmt: skip


def rollouts_of(x: LossInputs) -> list[Rollout]:
    return [Rollout(x, i) for i in range(len(x.pairs))]


@pytest.mark.parametrize("name, options, reference", CASES, ids=[f"{n}-{o}" for n, o, _ in CASES])
@pytest.mark.parametrize("seed", range(3))
def test_parity_of_values_and_gradients(make_loss, name, options, reference, seed):
    x = make_loss(seed)
    loss, gradient = value_and_gradient(name, x, **options)
    expected, slopes = torch.zeros_like(loss), torch.zeros_like(loss)
    rollouts = rollouts_of(x)
    for rollout, pairs in zip(rollouts, reference(rollouts), strict=True):
        for t, (value, slope) in zip(rollout.places, pairs, strict=True):
            expected[t], slopes[t] = value, slope
    assert torch.allclose(loss, expected, atol=1e-12)
    assert torch.allclose(gradient, slopes * torch.linspace(0.5, 2, len(loss), dtype=loss.dtype), atol=1e-12)


def objective_geo_mean(x: LossInputs, logp: Tensor) -> list[Tensor]:
    """GMPO, eq. 4, of each rollout, with its gradient by autograd of scalars."""
    out = []
    for r in rollouts_of(x):
        if not r.places:
            out.append(torch.zeros((), dtype=torch.float64))
            continue
        logs = []
        for t, q, a in zip(r.places, r.old_logprobs, r.advantages, strict=True):
            d = logp[t] - q
            bounded = d.clamp(-0.2, 0.3)
            logs.append(torch.min(d, bounded) if a > 0 else torch.max(d, bounded))
        out.append(-sum(r.advantages) / len(r.places) * torch.exp(sum(logs) / len(logs)))
    return out


def objective_dpo(x: LossInputs, logp: Tensor) -> list[Tensor]:
    """DPO, eq. 7, with label smoothing: the value of a rollout's pair."""
    rollouts, losses = rollouts_of(x), {}
    for pair in {r.pair for r in rollouts}:
        gain = {True: 0.0, False: 0.0}
        for r in rollouts:
            if r.pair == pair:
                gain[r.preferred] = sum((logp[t] for t in r.places), torch.zeros(())) - sum(r.ref_logprobs)
        margin = 0.5 * (gain[True] - gain[False])
        losses[pair] = -0.9 * torch.log(torch.sigmoid(margin)) - 0.1 * torch.log(torch.sigmoid(-margin))
    return [losses[r.pair] for r in rollouts]


def objective_kto(x: LossInputs, logp: Tensor) -> list[Tensor]:
    """KTO, eq. 8, with the reference point of the batch."""
    rollouts = rollouts_of(x)
    gains = [sum((logp[t] for t in r.places), torch.zeros(())) - sum(r.ref_logprobs) for r in rollouts]
    answered = [float(g.detach()) for g, r in zip(gains, rollouts, strict=True) if r.places]
    z = max(0.0, sum(answered) / len(answered))
    out = []
    for gain, r in zip(gains, rollouts, strict=True):
        weight, sign = (2.0, 1) if r.preferred else (0.5, -1)
        out.append(weight - weight * torch.sigmoid(sign * 0.3 * (gain - z)))
    return out


@pytest.mark.parametrize(
    "name, options, objective",
    [
        ("geo_mean", {"clip_low": 0.2, "clip_high": 0.3}, objective_geo_mean),
        ("dpo", {"beta": 0.5, "label_smoothing": 0.1}, objective_dpo),
        ("kto", {"beta": 0.3, "desirable": 2.0, "undesirable": 0.5}, objective_kto),
    ],
)
@pytest.mark.parametrize("seed", range(3))
def test_parity_of_losses_of_whole_rollouts(make_loss, name, options, objective, seed):
    x = make_loss(seed)
    loss, gradient = value_and_gradient(name, x, **options)
    logp = x.logprobs.clone().requires_grad_()
    values = objective(x, logp)
    expected = torch.stack([values[int(i)] for i in x.segments])
    expected = torch.where(x.loss_mask, expected, 0)
    (expected * torch.linspace(0.5, 2, len(loss), dtype=loss.dtype)).sum().backward()
    assert torch.allclose(loss, expected.detach(), atol=1e-9) and torch.allclose(gradient, logp.grad, atol=1e-9)


def test_the_reference_point_of_kto_is_the_mean_gain_of_the_batch_but_at_least_zero():
    """By hand: gains of 0.5, 1.5 and -0.5 nats have the mean 0.5; β = 1 and λ = 2 for the right answer."""
    ref = torch.tensor([[-1.0, -2.0], [-1.0, -2.0], [-1.0, 0.0]])
    logp = ref + torch.tensor([[0.25, 0.25], [1.0, 0.5], [-0.5, 7.0]])
    mask = torch.tensor([[1, 1], [1, 1], [1, 0]])
    right = torch.tensor([True, False, False])
    x = LossInputs.from_padded(logp, ref, torch.ones(3), mask, ref_logprobs=ref, preferred=right)
    loss, metrics = rlsdk.load("policy_loss", "kto", beta=1.0, desirable=2.0)(x)
    assert float(metrics["reference_point"]) == pytest.approx(0.5)
    sigmoid = [1 / (1 + math.exp(-v)) for v in (0.5 - 0.5, -(1.5 - 0.5), -(-0.5 - 0.5))]
    by_hand = [2 - 2 * sigmoid[0], 1 - sigmoid[1], 1 - sigmoid[2]]
    assert [float(row[0]) for row in x.to_padded(loss)] == pytest.approx(by_hand)
    down = x.replace(logprobs=x.ref_logprobs - 1.0)
    loss, metrics = rlsdk.load("policy_loss", "kto", beta=1.0)(down)
    assert float(metrics["reference_point"]) == 0.0
    assert float(loss[0]) == pytest.approx(1 - 1 / (1 + math.exp(2.0)))


def test_mix_gives_each_part_its_own_denominator(make_loss):
    x = make_loss(2)
    rollouts = rollouts_of(x)
    by_expert = {True: [], False: []}
    for r in rollouts:
        for p, q, a in zip(r.logprobs, r.old_logprobs, r.advantages, strict=True):
            by_expert[r.expert].append(-p if r.expert else scalar_ppo(p, q, a, 0.2, 0.2, 3.0)[0])
    expected = 0.7 * sum(by_expert[False]) / len(by_expert[False]) + 0.3 * sum(by_expert[True]) / len(by_expert[True])
    found = aggregate(run("mix", x, mu=0.3), x.loss_mask, x.segments, "token-mean")
    assert float(found) == pytest.approx(expected)
    imitation = rlsdk.load("policy_loss", "mix", mu=0.3)(x)[1]["expert_loss"]
    assert imitation.tolist() == pytest.approx(by_expert[True])
    metrics = rlsdk.load("policy_loss", "mix", mu=0.3)(x)[1]
    own = x.replace(loss_mask=x.loss_mask & ~x.expert[x.segments])
    for name, value in rlsdk.load("policy_loss", "ppo")(own)[1].items():
        assert metrics[name].tolist() == [float(value)] * len(by_expert[False])
    per_rollout = {True: [], False: []}
    for r in rollouts:
        losses = [-p if r.expert else scalar_ppo(p, q, a, 0.2, 0.2, 3.0)[0]
                  for p, q, a in zip(r.logprobs, r.old_logprobs, r.advantages, strict=True)]  # fmt: skip
        per_rollout[r.expert] += [sum(losses) / len(losses)] if losses else []
    expected = sum(w * sum(v) / len(v) for w, v in ((0.7, per_rollout[False]), (0.3, per_rollout[True])))
    loss = run("mix", x, mu=0.3, per="rollout")
    followed = run("mix", x.replace(aggregate="seq-mean-token-mean"), mu=0.3)
    assert torch.equal(loss, followed)
    assert float(aggregate(loss, x.loss_mask, x.segments, "seq-mean-token-mean")) == pytest.approx(expected)


def covariances(x: LossInputs) -> dict[int, float]:
    trained = x.loss_mask.nonzero()[:, 0].tolist()
    mean_a = sum(float(x.advantages[t]) for t in trained) / len(trained)
    mean_p = sum(float(x.logprobs[t]) for t in trained) / len(trained)
    return {t: (float(x.advantages[t]) - mean_a) * (float(x.logprobs[t]) - mean_p) for t in trained}


def test_kl_cov_penalises_the_greatest_covariances(make_loss):
    x = make_loss(1)
    covariance = covariances(x)
    count = int(0.2 * len(covariance))
    chosen = set(sorted(covariance, key=covariance.get, reverse=True)[:count])
    loss, gradient = value_and_gradient("kl_cov", x, ratio=0.2, kl_coef=0.5)
    weights = torch.linspace(0.5, 2, len(loss), dtype=loss.dtype)
    for t in covariance:
        delta = float(x.logprobs[t] - x.old_logprobs[t])
        value = slope = -float(x.advantages[t]) * math.exp(delta)
        if t in chosen:
            value, slope = value + 0.5 * abs(delta), slope + 0.5 * math.copysign(1, delta)
        assert float(loss[t]) == pytest.approx(value)
        assert float(gradient[t]) == pytest.approx(float(weights[t]) * slope)


def test_clip_cov_silences_random_tokens_between_the_bounds(make_loss):
    x = make_loss(1, 64)
    covariance = covariances(x)
    plain, _ = value_and_gradient("ppo", x, dual_clip=None)
    unclipped = -x.advantages * (x.logprobs - x.old_logprobs).exp()
    candidates = {t for t, c in covariance.items() if 0.5 < c < 3 and float(plain[t]) <= float(unclipped[t])}
    loss, gradient = value_and_gradient("clip_cov", x, ratio=0.05, cov_low=0.5, cov_high=3.0)
    silenced = {t for t in covariance if float(loss[t]) == 0 and float(plain[t]) != 0}
    assert len(silenced) == int(0.05 * len(covariance)) and silenced <= candidates
    assert all(float(gradient[t]) == 0 for t in silenced)
    others = [t for t in covariance if t not in silenced]
    assert torch.equal(loss[others], plain[others])
    other_step, _ = value_and_gradient("clip_cov", x.replace(step=1), ratio=0.05, cov_low=0.5, cov_high=3.0)
    assert not torch.equal(loss, other_step)


def one_token(ratio: float, advantage: float) -> LossInputs:
    p, a = torch.tensor([math.log(ratio)]).double(), torch.tensor([advantage]).double()
    return LossInputs(p, torch.zeros(1).double(), a, torch.ones(1).bool(), torch.zeros(1).long())


@pytest.mark.parametrize(
    "name, options, ratio, advantage, expected",
    [
        ("ppo", {}, 1.5, 2.0, -2.4),  # clipped above
        ("ppo", {}, 1.5, -2.0, 3.0),  # the worse of both stays
        ("ppo", {}, 0.5, -2.0, 1.6),  # clipped below
        ("ppo", {}, 5.0, -2.0, 6.0),  # dual clip at -A·3
        ("ppo", {"dual_clip": None}, 5.0, -2.0, 10.0),
        ("gspo", {}, 1.5, 2.0, -2.0008),
        ("gspo", {}, 0.5, -2.0, 1.9994),
        ("gspo", {}, 5.0, -2.0, 10.0),
        ("gspo", {"dual_clip": 3.0}, 5.0, -2.0, 6.0),
        ("gspo", {"dual_clip": 3.0}, 5.0, 2.0, -2.0008),
        ("cispo", {}, 1.5, 2.0, -1.28 * 2 * math.log(1.5)),
        ("cispo", {}, 0.01, 2.0, -0.01 * 2 * math.log(0.01)),
        ("sapo", {}, 1.0, 2.0, -4.0),  # sigmoid(0) = 1/2
        ("sapo", {}, 1.0, -2.0, 4 / 1.05),
        ("geo_mean", {}, 2.0, 1.0, -math.exp(0.4)),
        ("geo_mean", {}, 2.0, -1.0, 2.0),
        ("geo_mean", {"dual_clip": 1.5}, 2.0, -1.0, 1.5),
        ("tis", {}, 1.5, 2.0, -2 * math.log(1.5)),
        ("topr", {}, 2.0, -1.0, math.log(2.0)),
        ("topr", {}, 0.5, -1.0, 0.5 * math.log(0.5)),
        ("topr", {}, 0.5, 1.0, -math.log(0.5)),
        ("opmd", {}, 2.0, 3.0, -1.5 * math.log(2.0)),
        ("reinforce", {}, 2.0, 3.0, -3 * math.log(2.0)),
        ("gpg", {}, 2.0, 3.0, -3 * math.log(2.0)),
        ("sft", {}, 2.0, 3.0, -math.log(2.0)),
        ("decoupled_ppo", {}, 1.5, 2.0, -2.4),
        ("kl_cov", {}, 2.0, 3.0, -6 + math.log(2.0)),
        ("clip_cov", {}, 1.5, 2.0, -2.4),
    ],
)  # fmt: skip
def test_hand_computed(name, options, ratio, advantage, expected):
    assert run(name, one_token(ratio, advantage), **options).item() == pytest.approx(expected)


def one_rollout(log_ratios: list[float], advantages: list[float]) -> LossInputs:
    logp, credit = torch.tensor(log_ratios).double(), torch.tensor(advantages).double()
    count = len(logp)
    return LossInputs(logp, torch.zeros(count).double(), credit, torch.ones(count).bool(), torch.zeros(count).long())


@pytest.mark.parametrize(
    "advantages, slopes",
    [
        ([2.0, 2.0, 2.0, 2.0], [1.0, 1.0, 1.0, 0.0]),  # the last log-ratio, 0.6, is clipped to 0.4
        ([2.0, 0.0, 0.0, 2.0], [1.0, 0.0, 0.0, 0.0]),
        ([0.0, 0.0, 2.0, 0.0], [0.0, 0.0, 1.0, 0.0]),
    ],
)
def test_the_geometric_mean_leaves_tokens_out_and_does_not_change_the_gradient_of_the_others(advantages, slopes):
    """As 1/|o| · A · Π r^(1/|o|) of GMPO with the indicator of arXiv:2506.01939: log-ratios of mean (.1+.3-.2+.4)/4."""
    x = one_rollout([0.1, 0.3, -0.2, 0.6], advantages)
    logp = x.logprobs.clone().requires_grad_()
    loss = run("geo_mean", x.replace(logprobs=logp))
    assert loss.tolist() == pytest.approx([-2 * math.exp(0.15)] * 4)
    loss.mean().backward()
    assert logp.grad.tolist() == pytest.approx([-2 * math.exp(0.15) / 4 * slope for slope in slopes])


@pytest.mark.parametrize("name", ["geo_mean", "gspo", "ppo"])
def test_losses_agree_on_policy_about_tokens_that_are_left_out(name):
    x = one_rollout([0.0, 0.0, 0.0, 0.0, 0.0], [0.0, -3.0, 0.0, 0.0, -3.0])
    logp = x.logprobs.clone().requires_grad_()
    run(name, x.replace(logprobs=logp)).mean().backward()
    assert logp.grad.tolist() == pytest.approx([0.0, 0.6, 0.0, 0.0, 0.6])


def test_weights_of_decoupled_ppo_may_be_capped():
    x = one_token(1.0, 1.0).replace(behaviour_logprobs=torch.tensor([-math.log(2.0)]).double())
    assert run("decoupled_ppo", x).item() == pytest.approx(-2)
    assert run("decoupled_ppo", x, weight_cap=1.5).item() == 0


def test_only_tokens_that_would_have_a_gradient_count_as_clipped():
    ratios = torch.tensor([2.0, 2.0, 1.0, 2.0]).double().log()  # advantages: 0, 1, 1, and -1, which no bound meets
    advantages, rollouts = torch.tensor([0.0, 1.0, 1.0, -1.0]).double(), torch.arange(4)
    x = LossInputs(ratios, torch.zeros(4).double(), advantages, torch.ones(4).bool(), rollouts)
    for name in ("ppo", "gspo", "geo_mean"):
        assert float(rlsdk.load("policy_loss", name)(x)[1]["clip_share"]) == 0.25, name
        found = rlsdk.load("policy_loss", name)(x)[1]
        assert (float(found["clip_share_low"]), float(found["clip_share_high"])) == (0.0, 0.25), name
    for name in ("tis", "topr"):  # their bound takes no gradient away
        found = rlsdk.load("policy_loss", name)(x)[1]
        assert "clip_share" not in found and float(found["capped_share"]) > 0


@pytest.mark.parametrize(("name", "low", "high"), [("ppo", 0.5, 0.25), ("geo_mean", 0.5, 0.25), ("cispo", 0.5, 0.25)])
def test_tokens_are_counted_at_the_bound_that_clips_them(name, low, high):
    ratios = torch.tensor([0.1, 0.1, 9.0, 1.0]).double().log()
    advantages, rollouts = torch.tensor([-1.0, -1.0, 1.0, 1.0]).double(), torch.arange(4)
    x = LossInputs(ratios, torch.zeros(4).double(), advantages, torch.ones(4).bool(), rollouts)
    found = rlsdk.load("policy_loss", name, clip_low=0.4, clip_high=0.4)(x)[1]
    shares = [float(found[f"clip_share{end}"]) for end in ("_low", "_high", "")]
    assert shares == [low, high, low + high]


def test_topr_reads_the_whole_answer_against_the_sampler():
    p, q, m = (torch.tensor(v).double() for v in ([-1.0, -1.0], [-9.0, -9.0], [-0.5, -0.6]))
    x = LossInputs(p, q, -torch.ones(2).double(), torch.ones(2).bool(), torch.zeros(2).long(), behaviour_logprobs=m)
    assert run("topr", x).tolist() == pytest.approx([-math.exp(-0.9)] * 2)


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("mode", AGGREGATIONS)
def test_micro_batches_add_up_to_the_whole(make_loss, name, mode):
    x, options = make_loss(3, 10), RANDOM_CHOICE.get(name, {})
    totals = Totals.of(x.loss_mask, x.segments)

    def reduced(part, counts):
        return aggregate(run(name, part, **options), part.loss_mask, part.segments, mode, norm=7, totals=counts)

    logp = x.logprobs.clone().requires_grad_()
    whole = reduced(x.replace(logprobs=logp), None)
    whole.backward()
    pieces, parts = x.logprobs.clone().requires_grad_(), []
    for rows in ([0, 1], [2, 3, 4, 5], [6, 7, 8, 9]):
        chosen = (x.segments >= rows[0]) & (x.segments <= rows[-1])
        tokens = {k: v[chosen] for k, v in vars(x).items() if isinstance(v, Tensor) and len(v) == len(chosen)}
        tokens |= {k: getattr(x, k)[rows] for k in ("preferred", "expert")}
        tokens |= {"pairs": x.pairs[rows] - x.pairs[rows[0]], "segments": tokens["segments"] - rows[0]}
        tokens |= {"logprobs": pieces[chosen], "whole": x.detach(), "offset": int(chosen.nonzero()[0])}
        parts.append(reduced(LossInputs(**tokens), totals))
    sum(parts).backward()
    assert float(sum(parts).detach()) == pytest.approx(float(whole.detach()), abs=1e-10)
    assert torch.allclose(pieces.grad, logp.grad, atol=1e-12)


@pytest.mark.parametrize("name", [n for n in ALL if n != "clip_cov"])
def test_the_order_of_rollouts_does_not_matter(make_loss, name):
    x = make_loss(4)
    order = torch.randperm(8, generator=torch.Generator().manual_seed(1))
    tokens = torch.cat([(x.segments == i).nonzero()[:, 0] for i in order])
    moved = {k: v[tokens] for k, v in vars(x).items() if isinstance(v, Tensor) and len(v) == len(tokens)}
    moved |= {k: getattr(x, k)[order] for k in ("pairs", "preferred", "expert")}
    moved["segments"] = torch.repeat_interleave(torch.arange(8), torch.bincount(x.segments)[order])
    y = LossInputs(**moved)
    assert torch.allclose(torch.where(y.loss_mask, run(name, y), 0), torch.where(x.loss_mask, run(name, x), 0)[tokens])


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("garbage", [math.nan, math.inf, -math.inf])
def test_garbage_where_nothing_is_trained_leaks_neither_value_nor_gradient(make_loss, name, garbage):
    x = make_loss(5)
    fields = ("old_logprobs", "behaviour_logprobs", "ref_logprobs", "advantages", "logprobs")
    dirty = x.replace(**{f: torch.where(x.loss_mask, getattr(x, f), garbage) for f in fields})
    clean, soiled = value_and_gradient(name, x), value_and_gradient(name, dirty)
    assert torch.equal(clean[0], soiled[0]) and torch.equal(clean[1], soiled[1])
    assert soiled[1][~x.loss_mask].count_nonzero() == 0


@pytest.mark.parametrize("name", ALL)
def test_gradient_through_logprobs_alone(make_loss, name):
    x = make_loss(6)
    fields = ("logprobs", "old_logprobs", "behaviour_logprobs", "ref_logprobs", "advantages")
    leaves = {f: getattr(x, f).clone().requires_grad_() for f in fields}
    run(name, x.replace(**leaves)).sum().backward()
    assert leaves["logprobs"].grad is not None
    assert all(leaves[f].grad is None for f in fields[1:])


@pytest.mark.parametrize("name", ALL)
def test_extreme_ratios_stay_finite(make_loss, name):
    x = make_loss(7, dtype=torch.float32)
    for shift in (500.0, -500.0):
        loss, gradient = value_and_gradient(name, x.replace(logprobs=x.logprobs + shift))
        assert loss.isfinite().all() and gradient.isfinite().all()


@pytest.mark.parametrize("name", ALL)
def test_nothing_to_train(make_loss, name):
    x = make_loss(0)
    loss, gradient = value_and_gradient(name, x.replace(loss_mask=torch.zeros_like(x.loss_mask)))
    assert loss.count_nonzero() == 0 and gradient.count_nonzero() == 0
    fields = {k: v[:0] for k, v in vars(x).items() if isinstance(v, Tensor)}
    assert len(run(name, LossInputs(**fields))) == 0


@pytest.mark.parametrize("name", ALL)
def test_bfloat16_is_widened(make_loss, name):
    loss = run(name, make_loss(0, dtype=torch.bfloat16))
    assert loss.dtype == torch.float32 and loss.isfinite().all()


@pytest.mark.parametrize("name", ALL)
def test_metrics_are_detached_numbers_or_a_number_for_each_rollout_or_pair(make_loss, name):
    x = make_loss(0)
    result = rlsdk.load("policy_loss", name)(x.replace(logprobs=x.logprobs.clone().requires_grad_()))
    for value in (result[1] if isinstance(result, tuple) else {}).values():
        assert value.dim() <= 1 and not value.requires_grad and value.isfinite().all()


@pytest.mark.parametrize("name", ALL)
def test_only_declared_fields_are_read(make_loss, name):
    x, loss = make_loss(0), rlsdk.load("policy_loss", name)
    needs = component_of(loss).needs
    bare = x.only(needs)
    assert torch.equal(bare.behaviour_logprobs, x.behaviour_logprobs)
    loss(bare)
    for field in needs:
        with pytest.raises(MissingFieldError, match=field):
            loss(bare.replace(**{field: None}))


def test_gspo_has_the_gradient_of_the_papers_objective(make_loss):
    """Eq. 5, whose gradient goes through the ratio of the sequence, equals the form that detaches it."""
    x = make_loss(8)
    per_rollout = torch.randn(8, dtype=torch.float64)
    x = x.replace(advantages=per_rollout[x.segments])
    logp = x.logprobs.clone().requires_grad_()
    aggregate(run("gspo", x.replace(logprobs=logp), clip_low=0.05, clip_high=0.1), x.loss_mask, x.segments,
              "seq-mean-token-mean").backward()  # fmt: skip
    other, terms = x.logprobs.clone().requires_grad_(), []
    for r in rollouts_of(x):
        if r.places:
            ratio = torch.exp(sum(other[t] - q for t, q in zip(r.places, r.old_logprobs, strict=True)) / len(r.places))
            a = r.advantages[0]
            terms.append(-torch.min(ratio * a, ratio.clamp(0.95, 1.1) * a))
    (sum(terms) / len(terms)).backward()
    assert torch.allclose(logp.grad, other.grad, atol=1e-12)
