"""Packing groups of rollouts into arrays."""

import attrs
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlsdk.contracts import TrainBatch
from rlsdk.learners.rows import to_rows
from rlsdk.rollout.step_batch import apply_filters, pack, routing_metrics, spans
from rlsdk.types import Group, Score
from tests.rollout.masked import TASK, rollout

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
    assert packed.arrays.token_ids.tolist() == [100, 101, 102, 103, 200, 201, 202, 203]
    assert packed.arrays.starts.tolist() == [2, 1]
    assert packed.arrays.responses.tolist() == [2, 3]
    assert packed.arrays.loss_mask.tolist() == [True, True, True, False, True]
    assert packed.groups.tolist() == [0, 1]
    np.testing.assert_allclose(packed.arrays.tokens["behaviour_logprobs"], [-0.2, -0.3, -0.1, -0.2, -0.3], rtol=1e-6)


def test_pack_aligns_experts_with_all_tokens_and_counts_unknown_ones() -> None:
    known = attrs.evolve(rollout(2, [True, True, True]), routed_experts=np.full((5, 1, 2), 3, np.int16))
    other = rollout(1, [True, False, True], first=200)  # sampled by an engine that did not tell
    packed = pack([Group(TASK, [known, other], [Score(1.0), Score(0.0)])])
    assert packed is not None
    experts = packed.arrays.context["routed_experts"]
    assert experts[:, 0, 0].tolist() == [3] * 5 + [-1] * 4
    assert packed.arrays.select(np.array([1])).context["routed_experts"][:, 0, 0].tolist() == [-1] * 4
    # Four tokens of the first rollout are read, and three of the second: never the last.
    assert routing_metrics(packed.arrays) == {"routing/unknown": pytest.approx(3 / 7)}


def test_a_batch_without_experts_has_no_such_field() -> None:
    packed = pack([Group(TASK, [rollout(2, [True])], [Score(1.0)])])
    assert packed is not None
    assert packed.arrays.context == {}
    assert routing_metrics(packed.arrays) == {}


def test_the_first_token_of_a_rollout_is_not_trained_on_since_nothing_predicts_it() -> None:
    without_prompt, alone = rollout(0, [True, True, True]), rollout(0, [True])
    packed = pack([Group(TASK, [without_prompt, rollout(1, [True]), alone], [Score(1.0), Score(0.5), Score(0.0)])])
    assert packed is not None
    assert packed.rollouts[0] is without_prompt and len(packed.rollouts) == 2
    assert packed.arrays.starts.tolist() == [1, 1] and packed.arrays.responses.tolist() == [2, 1]
    assert packed.arrays.loss_mask.all()
    assert to_rows(packed.arrays, "padded").states.tolist() == [0, 1, 2]


def test_pack_of_nothing_valid_is_none() -> None:
    assert pack([Group(TASK, [rollout(1, [True])], [Score.invalid("x")])]) is None


def test_a_trajectory_with_a_step_that_could_not_be_scored_is_left_out_whole() -> None:
    steps = [attrs.evolve(rollout(1, [True]), trajectory=name, step=step) for name in "ab" for step in range(2)]
    group = Group(TASK, steps, [Score(0.25), Score.invalid("hung"), Score(0.5), Score(1.0)])
    (left,) = apply_filters([group], [])
    packed = pack([group])
    assert packed is not None
    for rollouts in (left.rollouts, packed.rollouts):
        assert [(r.trajectory, r.step) for r in rollouts] == [("b", 0), ("b", 1)]


@given(masks, st.data())
def test_selecting_rollouts_equals_packing_them_alone(rows: list[list[bool]], data: st.DataObject) -> None:
    rollouts = [rollout(data.draw(st.integers(1, 3)), row, first=10 * i) for i, row in enumerate(rows)]
    index = data.draw(st.lists(st.integers(0, len(rows) - 1), min_size=1, max_size=6))
    whole = pack([Group(TASK, rollouts, [Score(0.0)] * len(rollouts))])
    alone = pack([Group(TASK, [rollouts[i] for i in index], [Score(0.0)] * len(index))])
    assert whole is not None and alone is not None
    chosen = whole.arrays.select(np.array(index))
    for name in ("token_ids", "lengths", "starts", "responses", "loss_mask"):
        assert getattr(chosen, name).tolist() == getattr(alone.arrays, name).tolist()
    assert isinstance(chosen, TrainBatch)


def test_tokens_that_were_not_sampled_are_compared_with_the_old_policy_or_with_none() -> None:
    written = attrs.evolve(rollout(1, [True, True]), policy_versions=[-1, -1, -1])
    packed = pack([Group(TASK, [written, rollout(1, [True, True])], [Score(0.0)] * 2)])
    assert packed is not None
    old = np.array([-5, -6, -7, -8], np.float32)
    tokens = packed.with_fields(logprobs=old).for_update().arrays.tokens
    assert tokens["old_logprobs"].tolist() == old.tolist()
    assert tokens["behaviour_logprobs"].tolist() == pytest.approx([-5, -6, -0.1, -0.2])
    unknown = packed.for_update().arrays.tokens
    assert not {"old_logprobs", "behaviour_logprobs"} & unknown.keys()
