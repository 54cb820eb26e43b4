"""Shaping: hand-computed rewards, state, chaining."""

from __future__ import annotations

import json
import math
import statistics

import pytest
import torch

import rlsdk
from rlsdk.batch import CreditInputs
from rlsdk.components import component_of
from rlsdk.errors import MissingFieldError, OptionError, ValueFault

ALL = rlsdk.names("shaping")


def batch(rewards, groups=None, lengths=None, **fields) -> CreditInputs:
    lengths = torch.tensor(lengths or [2] * len(rewards))
    mask = torch.arange(int(lengths.max())) < lengths[:, None]
    return CreditInputs.from_padded(
        torch.tensor(rewards, dtype=torch.float64), mask, torch.tensor(groups or [0] * len(rewards)), **fields
    )


def test_kl_penalty_on_every_sampled_token():
    mask = torch.tensor([[True, False, True], [True, True, False]])
    logp = torch.tensor([[-1.0, math.nan, -2.0], [-1.0, -3.0, math.nan]])
    ref = torch.tensor([[-1.5, math.nan, -1.0], [-1.0, -1.0, math.nan]])
    x = CreditInputs.from_padded(torch.tensor([1.0, 2.0]), mask, torch.tensor([0, 0]), logprobs=logp, ref_logprobs=ref)
    found = rlsdk.load("shaping", "kl_penalty", coef=0.1)(x)
    assert x.to_padded(found).tolist()[0] == pytest.approx([-0.05, 0.0, 1.1])
    assert x.to_padded(found).tolist()[1] == pytest.approx([0.0, 2.2, 0.0])
    squared = rlsdk.load("shaping", "kl_penalty", coef=0.1, estimator="k2")(x)
    assert x.to_padded(squared).tolist()[0] == pytest.approx([-0.0125, 0.0, 0.95])


def test_the_adaptive_coefficient_steers_to_its_target():
    logp = torch.tensor([[-1.0, -1.0], [-1.0, -1.0]])
    x = batch([0.0, 0.0], logprobs=logp, ref_logprobs=logp - torch.tensor([[0.2, 0.2], [0.4, 0.4]]))  # KL 0.3
    penalty = rlsdk.load("shaping", "kl_penalty", coef=0.5, target=0.25, horizon=10)
    assert penalty.metrics() == {}
    assert penalty(x).tolist() == pytest.approx([-0.1, -0.1, -0.2, -0.2])
    assert penalty.metrics() == {"kl": pytest.approx(0.3), "coef": 0.5}  # which this batch was shaped by
    assert penalty.value == pytest.approx(0.5 * (1 + 0.2 * 2 / 10))  # 0.3 / 0.25 - 1 = 0.2, at the bound
    assert penalty(x).tolist() == pytest.approx([v * 1.04 for v in (-0.1, -0.1, -0.2, -0.2)])
    low = rlsdk.load("shaping", "kl_penalty", coef=0.5, target=0.32, horizon=10)
    low(x)
    assert low.value == pytest.approx(0.5 * (1 - 0.0625 * 2 / 10))
    fixed = rlsdk.load("shaping", "kl_penalty", coef=0.5)
    fixed(x)
    assert fixed.value == 0.5
    restored = rlsdk.load("shaping", "kl_penalty", coef=0.5, target=0.25, horizon=10)
    restored.restore(json.loads(json.dumps(penalty.state())))
    assert restored.value == penalty.value


def test_kl_penalty_refuses_a_target_of_zero():
    with pytest.raises(OptionError, match="above 0"):
        rlsdk.load("shaping", "kl_penalty", target=0.0)


def std(values):
    return statistics.stdev(values) + 1e-6


def test_reward_norm():
    rewards, groups, sources = [1.0, 0.0, 5.0, 9.0, 3.0], [0, 0, 1, 1, 2], torch.tensor([0, 0, 0, 1, 1])
    x = batch(rewards, groups, sources=sources)

    def norm(**options):
        return rlsdk.load("shaping", "reward_norm", **options)(x).tolist()

    assert norm(method="identity") == rewards
    assert norm(method="mean", by="group") == pytest.approx([0.5, -0.5, -2, 2, 0])
    assert norm(method="mean", by="source") == pytest.approx([-1, -2, 3, 3, -3])
    assert norm(method="mean", by="batch") == pytest.approx([-2.6, -3.6, 1.4, 5.4, -0.6])
    first, second = std([1, 0]), std([5, 9])
    assert norm(by="group") == pytest.approx([0.5 / first, -0.5 / first, -2 / second, 2 / second, 0])
    assert norm() == pytest.approx([(r - 3.6) / std(rewards) for r in rewards])
    outlier = batch([0.0] * 15 + [1.0])
    assert rlsdk.load("shaping", "reward_norm", method="asym_clip")(outlier).tolist()[-1] == 3.0
    assert rlsdk.load("shaping", "reward_norm", method="asym_clip")(batch([0.0, 1.0, 1.0, 1.0])).tolist()[0] == -1.0
    assert rlsdk.load("shaping", "reward_norm")(batch([0.1] * 5)).tolist() == [0.0] * 5


def test_running_norm_remembers_all_rewards():
    norm = rlsdk.load("shaping", "reward_norm", method="running")
    first, second = [1000.0, 1001.0, 1003.0], [1002.0, 999.0]
    assert norm(batch(first)).tolist() == pytest.approx([(r - statistics.mean(first)) / std(first) for r in first])
    other = rlsdk.load("shaping", "reward_norm", method="running")
    other.restore(json.loads(json.dumps(norm.state())))
    everything = first + second
    expected = [(r - statistics.mean(everything)) / std(everything) for r in second]
    assert norm(batch(second)).tolist() == pytest.approx(expected) == other(batch(second)).tolist()
    with pytest.raises(OptionError, match="running"):
        rlsdk.load("shaping", "reward_norm", method="running", by="group")


def test_reward_clip():
    assert rlsdk.load("shaping", "reward_clip", low=-1.0, high=2.0)(batch([-3.0, 0.5, 9.0])).tolist() == [-1, 0.5, 2]


def test_overlong_grows_over_the_buffer():
    x = batch([1.0] * 5, lengths=[2, 6, 8, 10, 12])
    found = rlsdk.load("shaping", "overlong", max_length=10, buffer=4, penalty=0.5)(x)
    assert found.tolist() == pytest.approx([1.0, 1.0, 0.75, 0.5, 0.5])
    with pytest.raises(ValueFault, match="buffer"):
        rlsdk.load("shaping", "overlong", max_length=10, buffer=0)(x)


def test_length_penalty_rewards_short_right_answers():
    x = batch([1.0, 1.0, 0.0, 0.0, 1.0, 1.0], [0, 0, 0, 0, 1, 1], lengths=[2, 10, 2, 10, 3, 3])
    found = rlsdk.load("shaping", "length_penalty", coef=0.4)(x)
    assert found.tolist() == pytest.approx([1.2, 0.8, 0.0, -0.2, 1.0, 1.0])


def test_cosine_length_shortens_right_answers_and_lengthens_wrong_ones():
    x = batch([1.0, 1.0, 1.0, 0.0, 0.0, 0.0, 1.5, 0.25], lengths=[4, 8, 12, 4, 8, 12, 4, 4])
    found = rlsdk.load("shaping", "cosine_length", max_length=8)(x).tolist()
    # Half way, a value is the mean of both; beyond the limit, it stays. Other parts, of 0.5 and 0.25, are added.
    assert found == pytest.approx([0.75, 0.5, 0.5, -0.75, -0.5, -0.5, 1.25, -0.5])
    paper = {"right_short": 2.0, "right_long": 1.0, "wrong_short": -10.0, "wrong_long": 0.0, "exceeded": -10.0}
    found = rlsdk.load("shaping", "cosine_length", max_length=12, **paper)(x).tolist()
    cosine = (1 + math.cos(math.pi / 3)) / 2  # a third of the way
    assert found[:3] == pytest.approx([1 + cosine, 1 + (1 - cosine), -10.0])
    assert found[3:6] == pytest.approx([-10 * cosine, -10 * (1 - cosine), -10.0])
    scaled = rlsdk.load("shaping", "cosine_length", max_length=8, passing=2.0)(batch([2.0, 1.0], lengths=[4, 4]))
    assert scaled.tolist() == pytest.approx([0.75, 1 - 0.75])


def test_cosine_length_agrees_with_trl():
    rewards = pytest.importorskip("trl.rewards")
    texts, lengths = [r"\boxed{2}", r"\boxed{3}"] * 3, [1, 2, 7, 7, 9, 30]
    theirs = rewards.get_cosine_scaled_reward(max_len=10)(
        [[{"role": "assistant", "content": text}] for text in texts], [r"$2$"] * 6, [[0] * n for n in lengths]
    )
    ours = rlsdk.load("shaping", "cosine_length", max_length=10)(batch([1.0, 0.0] * 3, lengths=lengths))
    assert ours.tolist() == pytest.approx(theirs)


def test_rank_penalty_spares_the_unlikely():
    logp = torch.tensor([[-1.0, -1.0], [-3.0, -1.0], [-1.0, -1.0], [-0.5, -0.1], [-9.0, -9.0]])
    x = batch([1.0] * 5, [0, 0, 0, 0, 1], logprobs=logp)
    found = rlsdk.load("shaping", "rank_penalty", coef=0.4)(x)
    assert found.tolist() == pytest.approx([1 - 0.4 * 3 / 4, 1 - 0.4 * 1 / 4, 1 - 0.4 * 3 / 4, 1 - 0.4, 1 - 0.4])


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("token_rewards", [False, True])
def test_what_all_have_in_common(make_credit, name, token_rewards):
    x, shaping = make_credit(1, token_rewards=token_rewards), rlsdk.load("shaping", name)
    needs = component_of(shaping).needs
    found = shaping(x.only(needs))
    assert found.shape in (x.rewards.shape, x.loss_mask.shape) and found.isfinite().all()
    dirty = {k: torch.where(x.loss_mask, getattr(x, k), torch.nan) for k in ("logprobs", "ref_logprobs", "values")}
    assert torch.equal(rlsdk.load("shaping", name)(x.replace(**dirty)), found)
    for field in needs if name != "reward_norm" else ():
        with pytest.raises(MissingFieldError, match=field):
            shaping(x.only(needs).replace(**{field: None}))
    nothing = CreditInputs(**{k: v[:0] for k, v in vars(x).items() if isinstance(v, torch.Tensor)})
    assert len(rlsdk.load("shaping", name)(nothing)) == 0


def test_shaped_rewards_keep_their_places():
    mask = torch.tensor([[True, True, False], [True, False, True]])
    x = CreditInputs.from_padded(torch.tensor([1.0, 2.0]), mask, torch.tensor([0, 0]))
    whole = x.shaped(torch.tensor([3.0, 4.0]))
    assert whole.rewards.tolist() == [3.0, 4.0] and not hasattr(whole, "token_rewards")
    tokens = x.shaped(torch.tensor([0.5, 1.0, 1.0, 0.0, 2.0]))
    assert tokens.rewards.tolist() == [1.5, 3.0]
    again = tokens.shaped(torch.tensor([2.5, 3.0]))
    assert again.token_rewards.tolist() == [0.5, 2.0, 1.0, 0.0, 2.0] and again.rewards.tolist() == [2.5, 3.0]
    assert torch.equal(again.outcomes, again.rewards)
