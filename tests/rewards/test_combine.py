"""The weighted sum of rewards."""

from __future__ import annotations

import pytest

from rlsdk.errors import ValueFault
from rlsdk.rewards.combine import combine
from rlsdk.types import Score


def test_a_weighted_sum_with_its_parts():
    total = combine([("right", 1.0, Score(0.5, metrics={"correct": 0.0}, reason="close")), ("form", 0.1, Score(1.0))])
    assert total.value == pytest.approx(0.6)
    assert total.metrics == {"reward/right": 0.5, "reward/form": 1.0, "correct": 0.0}
    assert total.reason == "right: close"
    assert total.token_rewards is None


def test_one_part_keeps_its_reason():
    assert combine([("right", 2.0, Score(0.5, reason="close"))]).reason == "close"


def test_a_metric_that_two_parts_report_is_named_by_part():
    total = combine([("a", 1.0, Score(1, metrics={"format": 1, "x": 2})), ("b", 1.0, Score(1, metrics={"format": 0}))])
    assert total.metrics == {"reward/a": 1, "reward/b": 1, "a/format": 1, "b/format": 0, "x": 2}


def test_an_invalid_part_makes_all_invalid_and_is_named():
    total = combine(
        [("a", 1.0, Score(1)), ("b", 0.0, Score.invalid("timed out")), ("c", 1.0, Score.invalid("c: gone"))]
    )
    assert not total.valid
    assert total.reason == "b: timed out; c: gone"


def test_token_rewards_are_added_by_position():
    first = Score(3.0, token_rewards=((2, 1.0), (5, 2.0)))
    second = Score(1.0, token_rewards=((5, 1.0),))
    total = combine([("a", 1.0, first), ("b", 0.5, second)])
    assert total.token_rewards == ((2, 1.0), (5, 2.5))
    assert total.value == sum(value for _, value in total.token_rewards)


def test_what_rewards_the_whole_rollout_lands_on_the_last_token():
    parts = [("a", 1.0, Score(3.0, token_rewards=((2, 3.0),))), ("b", 0.5, Score(1.0))]
    assert combine(parts, last_token=7).token_rewards == ((2, 3.0), (7, 0.5))
    with pytest.raises(ValueFault, match=r"'b'.*last_token"):
        combine(parts)


def test_nothing_cannot_be_combined():
    with pytest.raises(ValueFault, match="at least one"):
        combine([])
