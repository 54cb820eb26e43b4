"""The sampler `by_pass_rate`: pass rates and weights worked out by hand, and its memory."""

from __future__ import annotations

import numpy as np
import pytest

import rlsdk
from rlsdk.sources.sampling import ByPassRate

TASK = rlsdk.Task("one", "1 + 1?")


def group(*rewards: float | None) -> rlsdk.Group:
    """Return a group with these rewards; None is an invalid score."""
    scores = [rlsdk.Score(0.0, valid=False) if reward is None else rlsdk.Score(reward) for reward in rewards]
    return rlsdk.Group(TASK, [rlsdk.Rollout.from_text(TASK, "2")] * len(scores), scores)


def shares(sampler: ByPassRate, available: list[int], draws: int = 20_000) -> list[float]:
    random = np.random.default_rng(0)
    drawn = [sampler.draw(np.array(available), random) for _ in range(draws)]
    return [drawn.count(index) / draws for index in available]


def test_the_newest_group_counts_most_and_invalid_scores_count_nothing() -> None:
    sampler = ByPassRate(newest=0.25)
    sampler.note(4, group(1.0, 0.0, None, 0.5))  # 1 of 3
    sampler.note(4, group(1.0, 1.0))
    sampler.note(5, group(None))
    assert sampler.state() == {"4": pytest.approx(1 / 3 + 0.25 * 2 / 3)}


@pytest.mark.parametrize(
    ("prefer", "weights"),
    [("uncertain", [1.0, 0.1 + 0.9 * 0.75, 0.1, 0.1]), ("failed", [1.0, 0.1 + 0.9 * 0.75, 1.0, 0.1])],
)
def test_tasks_are_drawn_in_proportion_to_their_weights(prefer: str, weights: list[float]) -> None:
    sampler = rlsdk.load("sampler", "by_pass_rate", prefer=prefer, least=0.1)
    sampler.note(7, group(1.0, 0.0, 0.0, 0.0))
    sampler.note(8, group(0.0, 0.0))
    sampler.note(9, group(1.0, 1.0))
    sampler.note(100, group(1.0))  # not available below
    expected = [weight / sum(weights) for weight in weights]
    assert shares(sampler, [3, 7, 8, 9]) == pytest.approx(expected, abs=0.015)


def test_without_a_least_weight_tasks_are_still_drawn_when_all_are_solved() -> None:
    sampler = ByPassRate(least=0.0)
    for index in range(3):
        sampler.note(index, group(1.0))
    assert shares(sampler, [0, 1, 2]) == pytest.approx([1 / 3] * 3, abs=0.015)


def test_it_draws_the_same_after_a_restore() -> None:
    sampler, again = ByPassRate(), ByPassRate()
    for index in range(50):
        sampler.note(index, group(*np.random.default_rng(index).integers(0, 2, 4).astype(float)))
    again.restore(sampler.state())
    for seed in range(20):
        draws = [each.draw(np.arange(60), np.random.default_rng(seed)) for each in (sampler, again)]
        assert draws[0] == draws[1]
