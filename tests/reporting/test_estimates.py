"""Means and intervals compared with hand-computed values."""

from __future__ import annotations

import numpy as np
import pytest

from rlsdk.reporting.estimates import Estimate, interquartile_mean, mean, student_95, trimmed_mean


def test_mean_of_one_value_has_no_interval() -> None:
    assert mean([0.5]) == Estimate(0.5)


def test_interval_of_a_mean_is_students() -> None:
    found = mean([1.0, 2.0, 3.0])  # s = 1, t(2) = 4.303: 4.303 / sqrt(3) = 2.4843
    assert (found.value, found.low, found.high) == pytest.approx((2.0, 2 - 2.4843, 2 + 2.4843), abs=1e-3)


@pytest.mark.parametrize(
    "metric",
    ["accuracy/mean", "source/a/accuracy/mean", "raw/accuracy", "eval/greedy", "eval/a/b/sampled", "eval/pass@8"],
)
def test_interval_of_an_accuracy_stays_between_0_and_1(metric: str) -> None:
    assert mean([0.1, 0.9], metric) == Estimate(0.5, 0.0, 1.0)


@pytest.mark.parametrize("metric", ["", "reward/mean", "eval/sampled_reward", "eval/workflow/sampled", "eval/length"])
def test_interval_of_another_metric_is_not_cut(metric: str) -> None:
    assert mean([0.1, 0.9], metric) == mean([0.1, 0.9]) != Estimate(0.5, 0.0, 1.0)


@pytest.mark.parametrize(
    ("values", "expected"),
    [([5.0], 5.0), ([1.0, 3.0], 2.0), ([0.0, 1.0, 2.0, 9.0], 1.5), ([0.0, 1.0, 2.0, 3.0, 100.0], 2.0)],
)
def test_a_quarter_is_left_out_at_both_ends(values: list[float], expected: float) -> None:
    assert trimmed_mean(np.array(values)) == pytest.approx(expected)


def test_interquartile_mean_is_over_all_tasks_and_seeds() -> None:
    found = interquartile_mean({"a": [0.0, 1.0], "b": [2.0, 9.0]})
    assert found.value == 1.5
    # Of each task its own seeds are drawn: the least draw is 0, 0, 2, 2, the greatest 1, 1, 9, 9.
    assert (found.low, found.high) == (1.0, 5.0)


def test_equal_seeds_leave_no_doubt_and_one_seed_tells_nothing() -> None:
    assert interquartile_mean({"a": [0.5, 0.5], "b": [0.7, 0.7]}) == Estimate(0.6, 0.6, 0.6)
    assert interquartile_mean({"a": [0.5], "b": [0.7]}) == Estimate(pytest.approx(0.6))


def test_the_bootstrap_is_repeatable() -> None:
    scores = {"a": [0.1, 0.4, 0.3], "b": [0.5, 0.9, 0.2]}
    assert interquartile_mean(scores) == interquartile_mean(scores)


@pytest.mark.parametrize(
    ("freedom", "expected"),
    [(1, 12.706), (9, 2.262), (10, 2.228), (30, 2.042), (31, 2.0395), (60, 2.0003), (120, 1.9799), (10_000, 1.9602)],
)
def test_quantiles_are_those_of_the_tables(freedom: int, expected: float) -> None:
    assert student_95(freedom) == pytest.approx(expected, abs=5e-5)
