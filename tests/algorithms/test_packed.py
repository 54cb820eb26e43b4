"""Packing, sums along rollouts, aggregation: properties on random batches."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import rlsdk
from rlsdk.algorithms import packed
from rlsdk.algorithms.packed import SampledTokens, Segments
from rlsdk.batch import AGGREGATIONS, Credit, CreditInputs, LossInputs, Totals, aggregate
from rlsdk.batch.arithmetic import adjusted, whiten
from rlsdk.errors import MissingFieldError, ValueFault

quick = settings(max_examples=30, deadline=None)
lengths_lists = st.lists(st.integers(0, 9), min_size=1, max_size=7)


def random_batch(lengths: list[int], seed: int, keep: float = 0.7) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(loss, mask, segments) of rollouts of these lengths."""
    generator = torch.Generator().manual_seed(seed)
    total = sum(lengths)
    segments = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    return (
        torch.randn(total, generator=generator, dtype=torch.float64),
        torch.rand(total, generator=generator) < keep,
        segments,
    )


@pytest.mark.parametrize("factor", [1.0, 0.97, 0.5, 0.0])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_sums_equal_the_recursion_from_either_end(factor, dtype):
    lengths = torch.tensor([0, 3, 64, 65, 1, 0, 130, 700, 4200, 0])
    values = torch.randn(int(lengths.sum()), dtype=dtype)
    segments, start = Segments.of(lengths), 0
    to_go = segments.to_go(values, factor)
    so_far = segments.joined(segments.sums(segments.in_blocks(values), factor, forwards=True))
    for length in lengths.tolist():
        places = range(start, start + length)
        for found, order in ((to_go, reversed(places)), (so_far, places)):
            running = 0.0
            for t in order:
                running = float(values[t]) + factor * running
                assert float(found[t]) == pytest.approx(running, abs=1e-11 if dtype == torch.float64 else 1e-4)
        start += length


def test_sums_to_go_of_whole_numbers_are_exact():
    values = torch.randint(-3, 4, (5000,)).float()
    assert torch.equal(Segments.of(torch.tensor([5000])).to_go(values, 1.0), values.flip(0).cumsum(0).flip(0))


def test_a_small_factor_does_not_underflow():
    values = torch.ones(3000)
    assert torch.allclose(
        Segments.of(torch.tensor([3000])).to_go(values, 0.01), torch.full((3000,), 1 / 0.99), atol=0.02
    )
    assert float(Segments.of(torch.tensor([3000])).to_go(values, 0.01)[0]) == pytest.approx(1 / 0.99)


def test_whiten_is_unbiased_and_finite():
    found = whiten(torch.tensor([1.0, 2.0, 3.0]))
    assert torch.allclose(found, torch.tensor([-1.0, 0.0, 1.0]))
    assert whiten(torch.tensor([4.0])).tolist() == [0.0]
    assert whiten(torch.tensor([])).tolist() == []
    assert whiten(torch.full((7,), 0.1)).abs().max() < 1e-3


@quick
@given(lengths_lists, st.integers(0, 99), st.sampled_from(AGGREGATIONS))
def test_parts_add_up_to_the_whole(lengths, seed, mode):
    loss, mask, segments = random_batch(lengths, seed)
    totals, norm = Totals.of(mask, segments), 11.0
    whole = aggregate(loss, mask, segments, mode, norm=norm)
    parts = 0.0
    for first in range(0, len(lengths), 2):
        chosen = (segments == first) | (segments == first + 1)
        dense = torch.unique(segments[chosen], return_inverse=True)[1]
        parts += float(aggregate(loss[chosen], mask[chosen], dense, mode, norm=norm, totals=totals))
    assert parts == pytest.approx(float(whole), abs=1e-12)


@quick
@given(lengths_lists, st.integers(0, 99))
def test_aggregate_by_its_definition(lengths, seed):
    loss, mask, segments = random_batch(lengths, seed)
    rows = [loss[(segments == i) & mask] for i in range(len(lengths))]
    rows = [row for row in rows if len(row)]
    tokens, count = max(sum(map(len, rows)), 1), max(len(rows), 1)
    total = sum(float(row.sum()) for row in rows)
    expected = {
        "token-mean": total / tokens,
        "seq-mean-token-sum": total / count,
        "seq-mean-token-mean": sum(float(row.mean()) for row in rows) / count,
        "seq-mean-token-sum-norm": total / count / 5,
    }
    for mode, value in expected.items():
        assert float(aggregate(loss, mask, segments, mode, norm=5)) == pytest.approx(value, abs=1e-12)


@pytest.mark.parametrize("mode", AGGREGATIONS)
def test_nothing_to_train_gives_zero_with_a_graph(mode):
    loss = torch.tensor([float("nan"), float("inf")], requires_grad=True)
    found = aggregate(loss * 2, torch.tensor([False, False]), torch.tensor([0, 0]), mode, norm=3)
    found.backward()
    assert found.item() == 0 and loss.grad.tolist() == [0, 0]


def test_aggregate_names_what_is_wrong():
    ones = torch.ones(1)
    with pytest.raises(ValueFault, match="expected one of token-mean"):
        aggregate(ones, ones.bool(), ones.long() * 0, "mean")
    with pytest.raises(ValueFault, match="divides by norm"):
        aggregate(ones, ones.bool(), ones.long() * 0, "seq-mean-token-sum-norm")


def test_bfloat16_counts_do_not_stand_still():
    loss, mask = torch.ones(1000, dtype=torch.bfloat16), torch.ones(1000, dtype=torch.bool)
    for mode, value in {"token-mean": 1, "seq-mean-token-mean": 1, "seq-mean-token-sum": 1000}.items():
        assert float(aggregate(loss, mask, torch.zeros(1000, dtype=torch.long), mode)) == pytest.approx(value)
    x = LossInputs(loss, loss, loss, mask, torch.zeros(1000, dtype=torch.long))
    assert float(x.sequence_mean(loss)[0]) == 1 and float(x.sequence_sum(loss)[0]) == 1000


@quick
@given(lengths_lists, st.integers(0, 99))
def test_padding_round_trip(lengths, seed):
    values, mask, segments = random_batch(lengths, seed)
    n, width = len(lengths), max(lengths) + 2
    inside = torch.arange(width) < torch.tensor(lengths)[:, None]
    plane, planes_mask = torch.zeros(n, width, dtype=torch.float64), torch.zeros(n, width, dtype=torch.bool)
    plane[inside], planes_mask[inside] = values, mask
    rewards, groups = torch.arange(float(n)), torch.arange(n) // 2
    x = CreditInputs.from_padded(rewards, planes_mask, groups, lengths=torch.tensor(lengths), values=plane)
    assert torch.equal(x.values, values) and torch.equal(x.segments, segments)
    assert torch.equal(x.to_padded(x.values), plane)
    y = LossInputs.from_padded(plane, plane, rewards, planes_mask, lengths=torch.tensor(lengths))
    assert torch.equal(y.to_padded(y.logprobs), plane) and y.rollouts == n
    assert torch.equal(y.advantages, rewards[segments])


def test_lengths_run_to_the_last_sampled_token():
    mask = torch.tensor([[1, 0, 1, 0], [0, 0, 0, 0], [1, 1, 1, 1]]).bool()
    x = CreditInputs.from_padded(torch.zeros(3), mask, torch.tensor([5, 5, 9]))
    assert x.lengths.tolist() == [3, 0, 4] and x.groups.tolist() == [0, 0, 1]


@quick
@given(lengths_lists, st.integers(0, 99))
def test_sampled_takes_and_puts(lengths, seed):
    values, mask, segments = random_batch(lengths, seed)
    x = CreditInputs(torch.arange(1.0, len(lengths) + 1), torch.zeros(len(lengths)).long(), torch.tensor(lengths), mask)
    sampled = SampledTokens.of(x)
    assert torch.equal(sampled.put(sampled.take(values)), torch.where(mask, values, 0))
    assert sampled.counts.tolist() == [int(mask[segments == i].sum()) for i in range(len(lengths))]
    rewards = sampled.put(sampled.rewards(x))
    for i in range(len(lengths)):
        places = (mask & (segments == i)).nonzero()[:, 0].tolist()
        expected = [0.0] * len(places)
        expected[-1:] = [i + 1.0] if places else []
        assert rewards[places].tolist() == expected
    following = sampled.next(sampled.take(values))
    for i in range(len(lengths)):
        own = values[mask & (segments == i)].tolist()
        start = int(sampled.counts[:i].sum())
        assert following[start : start + len(own)].tolist() == [*own[1:], 0.0][: len(own)]


def test_an_absent_field_is_named():
    one = torch.ones(1)
    x = CreditInputs(one, torch.zeros(1).long(), one.long(), one.bool(), entropy=one)
    with pytest.raises(MissingFieldError, match=r"needs=\('values',\)"):
        x.values  # noqa: B018
    assert x.entropy.tolist() == [1.0]
    with pytest.raises(MissingFieldError, match="entropy"):
        x.only(("values",)).entropy  # noqa: B018


def test_a_name_that_only_the_other_inputs_have_is_named_with_the_nearest_one(make_credit):
    plane = torch.tensor([[-1.0]])
    loss = LossInputs.from_padded(plane, plane, torch.tensor([2.0]), torch.tensor([[1]]))
    credit = make_credit()
    with pytest.raises(AttributeError, match=r"'old_logprobs'; LossInputs has it; did you mean logprobs\?; a"):
        _ = credit.old_logprobs
    with pytest.raises(AttributeError, match=r"'per_token'; CreditInputs has it; a component"):
        _ = loss.per_token
    with pytest.raises(AttributeError, match=r"'sequence_sums'; did you mean sequence_sum\?; a component"):
        _ = loss.sequence_sums
    own = (
        r"'rewards'; CreditInputs has it; to pass its values to a loss, declare a field of your own under another name"
    )
    with pytest.raises(AttributeError, match=own):  # `rows` is private: no component could read it
        _ = loss.rewards


def test_groups_of_equal_values_have_exactly_that_mean():
    values = torch.tensor([0.1, 0.1, 0.1, 1000.0, 1000.1])
    x = CreditInputs(values, torch.tensor([0, 0, 0, 1, 1]), torch.zeros(5).long(), torch.zeros(0).bool())
    assert torch.equal(x.group_mean(values)[:3], values[:3])
    assert float(x.group_std(values)[3]) == pytest.approx(0.0707, rel=1e-2)
    assert x._groups.min(values).tolist()[2:4] == pytest.approx([0.1, 1000.0])
    assert x.group_size().tolist() == [3, 3, 3, 2, 2]


def test_the_generator_gives_each_micro_batch_the_same_numbers():
    given_ = torch.Generator().manual_seed(3)
    x = LossInputs(*[torch.zeros(1)] * 3, torch.ones(1).bool(), torch.zeros(1).long(), generator=given_)
    assert torch.equal(torch.rand(4, generator=x.generator), torch.rand(4, generator=x.generator))


def test_public_names():
    assert rlsdk.CreditInputs is CreditInputs and rlsdk.aggregate is aggregate


def test_advantages_are_whitened_then_clipped():
    values, mask = torch.tensor([1.0, float("nan"), 2.0, 3.0]), torch.tensor([True, False, True, True])
    assert adjusted(values, mask).tolist() == [1.0, 0.0, 2.0, 3.0]
    assert adjusted(values, mask, whitened=True).tolist() == pytest.approx([-1.0, 0.0, 0.0, 1.0])
    assert adjusted(values, mask, whitened=True, clip=0.5).tolist() == pytest.approx([-0.5, 0.0, 0.0, 0.5])


def test_inputs_built_by_hand_stand_at_the_first_step_and_keep_the_time_they_are_given():
    plane, mask = torch.zeros(2, 3), torch.ones(2, 3)
    x = rlsdk.LossInputs.from_padded(plane, plane, plane, mask)
    assert x.clock == {"step": 0, "of_steps": 1, "train_step": 0, "train_steps": 1, "update": 0}
    later = rlsdk.LossInputs.from_padded(plane, plane, plane, mask, train_step=4, train_steps=9, update=8)
    for copy in (later, later.only(()), later.detach(), later.whole, later.to("cpu"), later.replace(expert=None)):
        assert (copy.train_step, copy.train_steps, copy.update) == (4, 9, 8)
    credit = rlsdk.CreditInputs.from_padded(torch.zeros(2), mask, torch.zeros(2), train_step=4, train_steps=9)
    for same in (credit, credit.only(()), credit.shaped(torch.ones(6))):
        assert same.clock == {"train_step": 4, "train_steps": 9}
    assert rlsdk.CreditInputs.from_padded(torch.zeros(2), mask, torch.zeros(2)).clock["train_steps"] == 1


OPTIONS = {
    "gae": {"gamma": 0.9, "lam": 0.8},
    "reinforce_plus_plus": {"gamma": 0.9},
    "remax": {},
    "segment_returns": {"gamma": 0.5, "whiten": True},
    "optimal_token_baseline": {},
}


def run(name, x) -> Credit:
    return rlsdk.load("advantage", name, **OPTIONS[name])(x)


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("token_rewards", [False, True])
@pytest.mark.parametrize("in_order", [False, True])
@pytest.mark.parametrize("tokens", [1, 7, 40])
def test_parts_give_what_the_whole_gives(make_credit, monkeypatch, name, token_rewards, in_order, tokens):
    x = make_credit(3, 40, token_rewards=token_rewards)
    if in_order:  # otherwise groups are spread over the batch, and only a whole holds all of one
        x = x.replace(groups=x.groups.sort().values)
    expected = run(name, x)
    monkeypatch.setattr(packed, "PART_TOKENS", tokens)
    found = run(name, x)
    torch.testing.assert_close(found.advantages, expected.advantages)
    torch.testing.assert_close(found.returns, expected.returns)


def test_parts_hold_whole_rollouts_and_whole_groups(make_credit, monkeypatch):
    x = make_credit(4, 30)
    x = x.replace(groups=torch.arange(30) // 4)
    monkeypatch.setattr(packed, "PART_TOKENS", 20)
    alone, grouped = [], []

    def note(into):
        def estimate(part):
            into.append(part.groups.tolist())
            return (part.logprobs,)

        return estimate

    (found,) = packed.in_parts(note(alone), x)
    assert torch.equal(found, x.logprobs)
    packed.in_parts(note(grouped), x, together=x.groups)
    assert len(alone) >= len(grouped) > 3
    assert list(itertools.chain(*alone)) == list(itertools.chain(*grouped)) == x.groups.tolist()
    assert all(before[-1] != after[0] for before, after in itertools.pairwise(grouped))


def test_the_batch_is_left_as_it_was(make_credit):
    x = make_credit(5, 9, token_rewards=True)
    before = {k: v.clone() for k, v in vars(x).items() if isinstance(v, torch.Tensor)}
    for name in OPTIONS:
        run(name, x)
    assert all(torch.equal(getattr(x, k), v) for k, v in before.items())
    one = {"lengths": torch.tensor([1]), "loss_mask": torch.tensor([True])}
    single = x.replace(**{k: v[:1] for k, v in before.items()} | one)
    kept = single.token_rewards.clone()
    rlsdk.load("advantage", "reinforce_plus_plus")(single)
    assert torch.equal(single.token_rewards, kept)


@pytest.mark.parametrize("tokens", [3, 1000])
def test_whitening_in_place_equals_that_of_sampled_rollouts(monkeypatch, tokens):
    monkeypatch.setattr(packed, "PART_TOKENS", tokens)
    mask = torch.rand(50) < 0.6
    values = torch.where(mask, torch.randn(50, dtype=torch.float64), 0)
    expected = torch.zeros(50, dtype=torch.float64).masked_scatter(mask, whiten(values[mask]))
    torch.testing.assert_close(packed.whiten_sampled(values, mask), expected)
    nothing = torch.zeros(0)
    assert packed.whiten_sampled(nothing, nothing.bool()).tolist() == []
    assert packed.whiten_sampled(torch.tensor([4.0, 0.0]), torch.tensor([True, False])).tolist() == [0.0, 0.0]


@pytest.mark.parametrize(
    "wrong",
    ["groups", "baseline_rewards", "states", "token_rewards", "loss_mask", "logprobs", "values"],
)
def test_credit_inputs_of_a_wrong_length_are_refused(wrong):
    given = {
        "rewards": torch.zeros(2),
        "groups": torch.zeros(2, dtype=torch.int64),
        "lengths": torch.tensor([1, 2]),
        "loss_mask": torch.ones(3, dtype=torch.bool),
        "baseline_rewards": torch.zeros(2),
        "states": torch.zeros(2, dtype=torch.int64),
        "token_rewards": torch.zeros(3),
        "logprobs": torch.zeros(3),
        "values": torch.zeros(3),
    }
    CreditInputs(**given)
    given[wrong] = torch.cat([given[wrong], given[wrong][:1]])
    with pytest.raises(ValueFault, match=r"CreditInputs\.\w+ has shape \(\d,\); expected \(\d,\), one value per"):
        CreditInputs(**given)


@pytest.mark.parametrize("wrong", ["old_logprobs", "advantages", "loss_mask", "segments", "ref_logprobs", "entropy"])
def test_loss_inputs_of_a_wrong_length_are_refused_and_keep_no_graph_when_detached(wrong):
    given = {
        "logprobs": torch.zeros(3, requires_grad=True),
        "old_logprobs": torch.zeros(3),
        "advantages": torch.ones(3),
        "loss_mask": torch.ones(3, dtype=torch.bool),
        "segments": torch.tensor([0, 1, 1]),
        "ref_logprobs": torch.zeros(3),
        "entropy": torch.zeros(3),
    }
    assert not LossInputs(**given).detach().logprobs.requires_grad
    given[wrong] = given[wrong][:2]
    with pytest.raises(
        ValueFault, match=rf"LossInputs\.{wrong} has shape \(2,\); expected \(3,\), one value per token"
    ):
        LossInputs(**given)
