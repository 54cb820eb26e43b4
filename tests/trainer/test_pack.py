"""Packing: groups of rollouts to arrays, and what reaches credit assignment."""

import attrs
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import rlsdk
from rlsdk.contracts import TrainBatch
from rlsdk.rollout.lifecycle import State, Ticket
from rlsdk.trainer.credit import CreditAssigner, apply_filters
from rlsdk.trainer.keeping import ends_of
from rlsdk.trainer.pack import labels, minibatches, pack, spans
from rlsdk.types import Group, Rollout, Score, Task

TASK = Task(id="t", prompt="p")


def rollout(prompt: int, mask: list[bool], first: int = 100) -> Rollout:
    """A rollout with `prompt` prompt tokens and a response masked as given."""
    total = prompt + len(mask)
    return Rollout(
        TASK,
        (),
        np.arange(first, first + total),
        [False] * prompt + mask,
        np.arange(total) * -0.1,
        [-1] * prompt + [0] * len(mask),
    )


masks = st.lists(st.lists(st.booleans(), min_size=1, max_size=6).filter(any), min_size=1, max_size=8)


@given(masks, st.data())
def test_spans_run_from_the_first_sampled_token_to_the_last(rows: list[list[bool]], data: st.DataObject) -> None:
    prompts = [data.draw(st.integers(1, 4)) for _ in rows]
    whole = [[False] * p + row for p, row in zip(prompts, rows, strict=True)]
    starts, responses = spans(np.concatenate(whole), np.array([len(w) for w in whole]))
    for w, start, length in zip(whole, starts, responses, strict=True):
        expected = [i for i, m in enumerate(w) if m]
        assert start == expected[0]
        assert length == expected[-1] - expected[0] + 1


def test_pack_keeps_valid_rollouts_and_their_response_tokens() -> None:
    groups = [
        Group(TASK, [rollout(2, [True, True]), rollout(2, [True])], [Score(1.0), Score.invalid("hung")]),
        Group(TASK, [rollout(1, [True, False, True], first=200)], [Score(0.5)]),
    ]
    packed = pack(groups)
    assert packed is not None
    assert packed.batch.token_ids.tolist() == [100, 101, 102, 103, 200, 201, 202, 203]
    assert packed.batch.starts.tolist() == [2, 1]
    assert packed.batch.responses.tolist() == [2, 3]
    assert packed.batch.loss_mask.tolist() == [True, True, True, False, True]
    assert packed.groups.tolist() == [0, 1]
    np.testing.assert_allclose(packed.batch.tokens["behaviour_logprobs"], [-0.2, -0.3, -0.1, -0.2, -0.3], rtol=1e-6)


def test_pack_of_nothing_valid_is_none() -> None:
    assert pack([Group(TASK, [rollout(1, [True])], [Score.invalid("x")])]) is None


@given(masks, st.data())
def test_selecting_rollouts_equals_packing_them_alone(rows: list[list[bool]], data: st.DataObject) -> None:
    rollouts = [rollout(data.draw(st.integers(1, 3)), row, first=10 * i) for i, row in enumerate(rows)]
    index = data.draw(st.lists(st.integers(0, len(rows) - 1), min_size=1, max_size=6))
    whole = pack([Group(TASK, rollouts, [Score(0.0)] * len(rollouts))])
    alone = pack([Group(TASK, [rollouts[i] for i in index], [Score(0.0)] * len(index))])
    assert whole is not None and alone is not None
    chosen = whole.batch.select(np.array(index))
    for name in ("token_ids", "lengths", "starts", "responses", "loss_mask"):
        assert getattr(chosen, name).tolist() == getattr(alone.batch, name).tolist()
    assert isinstance(chosen, TrainBatch)


@given(st.lists(st.integers(1, 4), min_size=1, max_size=10), st.integers(1, 5), st.integers(1, 3))
def test_minibatches_cover_every_rollout_once_a_pass(sizes: list[int], count: int, passes: int) -> None:
    packed = pack([Group(TASK, [rollout(1, [True])] * n, [Score(0.0)] * n) for n in sizes])
    assert packed is not None
    parts = minibatches(packed, count, passes, [0, 1])
    assert sorted(np.concatenate(parts).tolist()) == sorted(list(range(sum(sizes))) * passes)
    again = minibatches(packed, count, passes, [0, 1])
    assert all((a == b).all() for a, b in zip(parts, again, strict=True))


@given(st.lists(st.integers(1, 4), min_size=1, max_size=10), st.integers(1, 5))
def test_whole_groups_stay_in_one_minibatch(sizes: list[int], count: int) -> None:
    packed = pack([Group(TASK, [rollout(1, [True])] * n, [Score(0.0)] * n) for n in sizes])
    assert packed is not None
    parts = minibatches(packed, count, 1, [0, 1], whole_groups=True)
    assert sorted(np.concatenate(parts).tolist()) == list(range(sum(sizes)))
    assert sum(len(np.unique(packed.groups[part])) for part in parts) == len(sizes)
    assert len(parts) == min(count, len(sizes))


def graded(*rewards: float) -> Group:
    """A group of one task with these rewards."""
    task = Task(id=str(rewards), prompt="p")
    return Group(task, [rollout(1, [True, True])] * len(rewards), [Score(r) for r in rewards])


def test_what_experts_wrote_stands_behind_and_gets_no_credit() -> None:
    packed = pack([graded(0.0, 1.0), graded(0.5)], [Group(TASK, [rollout(1, [True])], [Score(0.0)])])
    assert packed is not None
    assert (packed.sampled, packed.sampled_tokens, packed.groups.tolist()) == (3, 6, [0, 0, 1, 2])
    assert labels(packed, frozenset({"expert"}))["expert"].tolist() == [False, False, False, True]

    @rlsdk.advantage("batch_mean", needs=("values",))
    def batch_mean(x: rlsdk.CreditInputs) -> torch.Tensor:
        assert len(x.values) == 6
        return x.rewards - x.rewards.mean()

    computed = {"values": np.zeros(7, np.float32)}
    batch = CreditAssigner([], rlsdk.load("advantage", batch_mean)).assign(packed, computed)
    assert batch.tokens["advantages"].tolist() == [-0.5, -0.5, 0.5, 0.5, 0.0, 0.0, 0.0]
    assert pack([], [Group(TASK, [rollout(1, [True])], [Score(0.0)])]) is None


def test_greedy_rewards_reach_the_advantage_and_a_group_without_one_stays_out() -> None:
    first, second = graded(0.0, 1.0), graded(0.5, 0.75)
    packed = pack([first, second], baselines={id(second.task): 0.25})
    assert packed is not None
    batch = CreditAssigner([], rlsdk.load("advantage", "remax")).assign(packed, {})
    assert [s.value for s in packed.scores] == [0.5, 0.75]
    assert batch.tokens["advantages"].tolist() == [0.25, 0.25, 0.5, 0.5]


def test_preferred_is_above_the_mean_of_the_group_or_alone_of_the_batch() -> None:
    packed = pack([graded(0.0, 1.0, 0.2), graded(0.6), graded(0.1)])  # the batch's mean is 0.38
    assert packed is not None
    found = labels(packed, frozenset({"preferred"}))
    assert {name: values.tolist() for name, values in found.items()} == {"preferred": [False, True, False, True, False]}


def test_pairs_are_groups_of_a_better_and_a_worse_rollout() -> None:
    needs = frozenset({"pairs", "preferred"})
    packed = pack([graded(1.0, 0.0), graded(0.2, 0.4)])
    assert packed is not None
    found = labels(packed, needs)
    assert found["pairs"].tolist() == [0, 0, 1, 1]
    assert found["preferred"].tolist() == [True, False, False, True]
    for wrong in (graded(0.0, 0.5, 1.0), graded(1.0), graded(0.5, 0.5)):
        packed = pack([graded(1.0, 0.0), wrong])
        assert packed is not None
        with pytest.raises(
            rlsdk.RlsdkError, match=r"learns from pairs .* has \d rollouts.*add the filter 'best_worst'"
        ):
            labels(packed, needs)


def test_an_advantage_sees_only_what_it_declared() -> None:
    packed = pack([Group(TASK, [rollout(1, [True])] * 2, [Score(0.0), Score(1.0)])])
    assert packed is not None

    @rlsdk.advantage("peeks")
    def peeks(x: rlsdk.CreditInputs) -> torch.Tensor:
        return x.values

    @rlsdk.advantage("declares", needs=("values",))
    def declares(x: rlsdk.CreditInputs) -> torch.Tensor:
        return x.values

    values = {"values": np.array([0.25, 0.75], np.float32)}
    with pytest.raises(AttributeError, match=r"values was not computed.*needs=\('values',\)"):
        CreditAssigner([], rlsdk.load("advantage", peeks)).assign(packed, values)
    batch = CreditAssigner([], rlsdk.load("advantage", declares)).assign(packed, values)
    assert batch.tokens["advantages"].tolist() == [0.25, 0.75]


def test_token_rewards_reach_the_advantage_at_their_tokens() -> None:
    seen: list[torch.Tensor] = []

    @rlsdk.advantage("looks", needs=("token_rewards",))
    def looks(x: rlsdk.CreditInputs) -> torch.Tensor:
        seen.append(x.token_rewards)
        return x.rewards

    scores = [Score(3.0, token_rewards=((1, 1.0), (3, 2.0))), Score(5.0)]
    packed = pack([Group(TASK, [rollout(1, [True, True, True])] * 2, scores)])
    assert packed is not None
    CreditAssigner([], rlsdk.load("advantage", looks)).assign(packed, {})
    assert seen[0].tolist() == [1.0, 0.0, 2.0, 0.0, 0.0, 5.0]


def test_a_wrong_shape_names_the_component() -> None:
    packed = pack([Group(TASK, [rollout(1, [True, True])] * 2, [Score(0.0)] * 2)])
    assert packed is not None

    @rlsdk.advantage("crooked")
    def crooked(x: rlsdk.CreditInputs) -> torch.Tensor:
        return torch.zeros(7)

    with pytest.raises(rlsdk.RlsdkError, match=r"advantage 'crooked' returned \[7\]; expected a tensor \[2\].*\[4\]"):
        CreditAssigner([], rlsdk.load("advantage", crooked)).assign(packed, {})


def test_filters_see_valid_rollouts_and_may_take_parts() -> None:
    group = Group(TASK, [rollout(1, [True])] * 3, [Score(1.0), Score.invalid("x"), Score(0.0)])
    best = apply_filters([group], [lambda g: Group(g.task, g.rollouts[:1], g.scores[:1])])
    assert [len(g) for g in best] == [1]
    assert apply_filters([group], [lambda g: len(g) == 3]) == []
    assert [len(g) for g in apply_filters([group], [])] == [2]


def test_each_group_of_a_batch_ends_as_what_became_of_it() -> None:
    def ticket(number: int, mask: list[bool], *, valid: bool = True) -> Ticket:
        task = Task(id=f"t{number}", prompt="p")
        made = attrs.evolve(rollout(1, mask), task=task)
        score = Score(1.0) if valid else Score.invalid("hung")
        return Ticket(number, "a", task, group=Group(task, [made, made], [score, Score.invalid("hung")]))

    tickets = [ticket(0, [False]), ticket(1, [True], valid=False), ticket(2, [True]), ticket(3, [True])]
    left_out = tickets[3].group
    packed = pack([t.group for t in tickets if t.group is not None and t.group is not left_out])
    assert ends_of(tickets, packed) == [State.FILTERED, State.FAILED, State.TRAINED, State.FILTERED]
    assert ends_of(tickets[:2], None) == [State.FILTERED, State.FAILED]
