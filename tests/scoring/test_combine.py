"""The weighted sum of rewards."""

from __future__ import annotations

import reprlib

import pytest

from rlsdk.contracts import RewardSpec
from rlsdk.errors import ValueFault
from rlsdk.scoring.outcome import as_score, as_scores, combine
from rlsdk.types import Score, Task


def test_a_weighted_sum_with_its_parts():
    total = combine(
        [
            (RewardSpec("right"), Score(0.5, metrics={"correct": 0.0}, reason="close")),
            (RewardSpec("form", 0.1), Score(1.0)),
        ]
    )
    assert total.value == pytest.approx(0.6)
    assert total.metrics == {"reward/right": 0.5, "reward/form": 1.0, "correct": 0.0}
    assert total.reason == "right: close"
    assert total.token_rewards is None


def test_one_part_keeps_its_reason():
    assert combine([(RewardSpec("right", 2.0), Score(0.5, reason="close"))]).reason == "close"


def test_a_metric_that_two_parts_report_is_named_by_part():
    total = combine(
        [(RewardSpec("a"), Score(1, metrics={"format": 1, "x": 2})), (RewardSpec("b"), Score(1, metrics={"format": 0}))]
    )
    assert total.metrics == {"reward/a": 1, "reward/b": 1, "a/format": 1, "b/format": 0, "x": 2}


def test_a_metric_of_a_part_does_not_replace_the_value_of_another_or_of_its_own():
    bonus = (RewardSpec("bonus"), Score(1, metrics={"reward/right": 9, "reward/bonus": 9}))
    assert combine([(RewardSpec("right"), Score(0)), bonus]).metrics == {
        "reward/right": 0,
        "reward/bonus": 1,
        "bonus/reward/right": 9,
        "bonus/reward/bonus": 9,
    }
    assert combine([bonus]).metrics == {"reward/bonus": 1, "bonus/reward/bonus": 9, "reward/right": 9}


def test_an_invalid_part_makes_all_invalid_and_is_named():
    total = combine(
        [
            (RewardSpec("a"), Score(1)),
            (RewardSpec("b", 0.0), Score.invalid("timed out")),
            (RewardSpec("c"), Score.invalid("c: gone")),
        ]
    )
    assert not total.valid
    assert total.reason == "b: timed out; c: gone"


def test_token_rewards_are_added_by_position():
    first = Score(3.0, token_rewards=((2, 1.0), (5, 2.0)))
    second = Score(1.0, token_rewards=((5, 1.0),))
    total = combine([(RewardSpec("a"), first), (RewardSpec("b", 0.5), second)])
    assert total.token_rewards == ((2, 1.0), (5, 2.5))
    assert total.value == sum(value for _, value in total.token_rewards)


def test_what_rewards_the_whole_rollout_lands_on_the_last_token():
    parts = [(RewardSpec("a"), Score(3.0, token_rewards=((2, 3.0),))), (RewardSpec("b", 0.5), Score(1.0))]
    assert combine(parts, last_token=7).token_rewards == ((2, 3.0), (7, 0.5))
    with pytest.raises(ValueFault, match=r"'b'.*last_token"):
        combine(parts)


def test_token_rewards_with_another_sum_than_the_value_are_invalid():
    kept = Score(1.0, token_rewards=[(3, 0.1)] * 10)
    assert as_score(kept) is kept
    assert as_score(Score(0.0, token_rewards=())).valid
    for value, pairs in ((1.0, [(3, 0.25)]), (0.5, []), (0.0, [(3, 1.0)])):
        score = as_score(Score(value, token_rewards=pairs))
        assert not score.valid
        assert score.reason.endswith(f"expected its value, {value:g}")


def test_nothing_cannot_be_combined():
    with pytest.raises(ValueFault, match="at least one"):
        combine([])


def test_factors_multiply_the_sum():
    parts = [
        (RewardSpec("right", 2.0), Score(0.5)),
        (RewardSpec("form", multiply=True), Score(0.5)),
        (RewardSpec("short"), Score(1.0)),
    ]
    total = combine(parts)
    assert total.value == (2.0 * 0.5 + 1.0) * 0.5
    assert total.metrics == {"reward/right": 0.5, "reward/form": 0.5, "reward/short": 1.0}


def test_factors_alone_make_a_product():
    parts = [(RewardSpec("a", multiply=True), Score(0.5)), (RewardSpec("b", multiply=True), Score(0.25))]
    assert combine(parts).value == 0.125


def test_what_a_gate_shut_out_counts_as_zero():
    gate = RewardSpec("form", 0.1, gate=1.0)
    assert gate.shuts(Score(0.9))
    assert not gate.shuts(Score(1.0))
    assert not gate.shuts(Score.invalid("gone"))
    assert not RewardSpec("form").shuts(Score(0.0))
    total = combine([(gate, Score(0.5, reason="no tags")), (RewardSpec("right"), None)])
    assert total.value == pytest.approx(0.05)
    assert total.metrics == {"reward/form": 0.5, "reward/right": 0.0}
    assert total.reason == "form: no tags"
    assert combine([(gate, Score(0.5)), (RewardSpec("right", multiply=True), None)]).value == 0.0


def test_a_range_becomes_zero_to_one():
    rule = RewardSpec("judge", 0.5, range=(0.0, 10.0))
    assert combine([(rule, Score(8.0))]).value == pytest.approx(0.4)
    assert combine([(rule, Score(12.0))]).value == 0.5
    assert combine([(rule, Score(-3.0))]).value == 0.0
    assert combine([(rule, Score(8.0))]).metrics == {"reward/judge": 8.0}
    falling = RewardSpec("length", range=(100.0, 0.0))  # the less the better
    assert combine([(falling, Score(25.0))]).value == 0.75


def test_factors_act_on_token_rewards():
    first = Score(3.0, token_rewards=((2, 1.0), (5, 2.0)))
    total = combine([(RewardSpec("steps"), first), (RewardSpec("form", multiply=True), Score(0.5))])
    assert total.token_rewards == ((2, 0.5), (5, 1.0))
    assert total.value == sum(value for _, value in total.token_rewards)


def test_a_part_is_for_its_sources():
    rule = RewardSpec("math", sources=("gsm8k",))
    assert rule.applies(Task(id="1", prompt="?", source="gsm8k"))
    assert not rule.applies(Task(id="1", prompt="?", source="code"))
    assert RewardSpec("math").applies(Task(id="1", prompt="?", source="code"))


def test_parts_that_combine_to_more_than_a_reward_may_be_are_invalid():
    parts = [(RewardSpec("a"), Score(1e18)), (RewardSpec("b", multiply=True), Score(10.0))]
    found = combine(parts)
    assert not found.valid
    assert found.reason == "the parts combine to 1e+19, beyond ±1e+18"


def test_the_answer_is_that_of_the_first_part_that_tells_one():
    parts = [(RewardSpec("form"), Score(1.0)), (RewardSpec("skipped"), None)]
    assert combine(parts).answer == ""
    parts += [(RewardSpec("right"), Score(0.0, answer="7")), (RewardSpec("text"), Score(0.0, answer="seven"))]
    assert combine(parts).answer == "7"


@pytest.mark.parametrize("result", [1.0, None, "10", b"10", {1.0, 0.0}, {"a": 1.0, "b": 0.0}, (x for x in (1, 0))])
def test_what_is_no_list_scores_none_of_the_rollouts(result):
    first, second = as_scores(result, 2)
    assert first == second and not first.valid
    assert first.reason == f"it returned {reprlib.repr(result)}; expected a list of 2 scores"
