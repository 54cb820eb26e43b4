"""The sampler `by_pass_rate`: pass rates and weights worked out by hand, its metrics, and its memory."""

from __future__ import annotations

import json
from typing import Any

import attrs
import numpy as np
import pytest

import rlsdk
from rlsdk.errors import OptionError
from rlsdk.sources import sampling
from rlsdk.sources.sampling import ByPassRate

TASK = rlsdk.Task("one", "1 + 1?")


def group(*rewards: float | None) -> rlsdk.Group:
    """Return a group with these rewards; None is an invalid score."""
    scores = [rlsdk.Score(0.0, valid=False) if reward is None else rlsdk.Score(reward) for reward in rewards]
    return rlsdk.Group(TASK, [rlsdk.Rollout.from_text(TASK, "2")] * len(scores), scores)


def shares(sampler: ByPassRate, available: list[int], draws: int = 8_000) -> list[float]:
    random = np.random.default_rng(0)
    drawn = [sampler.draw(np.array(available), random) for _ in range(draws)]
    return [drawn.count(index) / draws for index in available]


def test_the_newest_group_counts_most_and_invalid_scores_count_nothing() -> None:
    sampler = ByPassRate(newest=0.25)
    sampler.note(4, group(1.0, 0.0, None, 0.5))  # 1 of 3
    sampler.note(4, group(1.0, 1.0))
    sampler.note(5, group(None))
    assert sampler.state()["rates"] == {"4": pytest.approx(1 / 3 + 0.25 * 2 / 3)}


def test_of_a_trajectory_only_the_last_rollout_counts() -> None:
    steps = [
        attrs.evolve(rlsdk.Rollout.from_text(TASK, "2"), trajectory=name, step=step) for name in "ab" for step in (0, 1)
    ]
    scores = [rlsdk.Score(value) for value in (0.0, 1.0, 1.0, 0.0)]  # a passes, b does not
    sampler = ByPassRate()
    sampler.note(0, rlsdk.Group(TASK, steps, scores))
    assert sampler.state()["rates"] == {"0": 0.5}
    sampler.note(1, rlsdk.Group(TASK, steps, [rlsdk.Score(0.0, valid=False), *scores[1:]]))
    assert sampler.state()["rates"] == {"0": 0.5, "1": 0.0}  # nothing is known of a


@pytest.mark.parametrize(
    ("options", "weights"),
    [
        ({}, [1.0, 0.1 + 0.9 * 0.75, 0.1, 0.1]),
        ({"target": 0.75}, [1.0, 0.1 + 0.9 * (1 - (0.5 / 0.75) ** 2), 0.1, 0.1 + 0.9 * (1 - (0.25 / 0.75) ** 2)]),
        ({"prefer": "failed"}, [1.0, 0.1 + 0.9 * 0.75, 1.0, 0.1]),
    ],
)
@pytest.mark.parametrize("tries", [64, 0])  # by rejecting proposals, and from all weights
def test_tasks_are_drawn_in_proportion_to_their_weights(
    options: dict[str, Any], weights: list[float], tries: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sampling, "_TRIES", tries)
    sampler = rlsdk.load("sampler", "by_pass_rate", least=0.1, **options)
    sampler.note(7, group(1.0, 0.0, 0.0, 0.0))
    sampler.note(8, group(0.0, 0.0))
    sampler.note(9, group(1.0, 1.0))
    sampler.note(100, group(1.0))  # not available below
    expected = [weight / sum(weights) for weight in weights]
    assert shares(sampler, [3, 7, 8, 9]) == pytest.approx(expected, abs=0.02)


def test_without_a_least_weight_tasks_are_still_drawn_when_all_are_solved() -> None:
    sampler = ByPassRate(least=0.0)
    for index in range(3):
        sampler.note(index, group(1.0))
    assert shares(sampler, [0, 1, 2], draws=1000) == pytest.approx([1 / 3] * 3, abs=0.05)


def test_a_source_weighs_as_much_as_its_newest_groups() -> None:
    sampler = ByPassRate(source_window=4, least=0.2)
    assert sampler.source_weight() == 1.0
    sampler.note(0, group(1.0, 1.0))  # weight 0.2
    assert sampler.source_weight() == pytest.approx(1 - 0.8 / 4)
    sampler.note(1, group(1.0, 0.0))  # weight 1
    assert sampler.source_weight() == pytest.approx(0.8 + 0.2 / 4)
    fixed = ByPassRate()
    fixed.note(0, group(1.0, 1.0))
    assert fixed.source_weight() == 1.0


def test_metrics_are_of_the_tasks_seen_and_of_those_drawn_since_the_last_call() -> None:
    sampler, random = ByPassRate(source_window=10), np.random.default_rng(0)
    assert sampler.metrics() == {"seen": 0.0, "source_weight": 1.0}
    for index, rewards in enumerate(((1.0, 1.0), (1.0, 0.0), (0.0, 0.0))):
        sampler.note(index, group(*rewards))
    for index in (0, 1, 2, 3, 3, 3, 3, 3):
        sampler.draw(np.array([index]), random)
    metrics = sampler.metrics()
    assert metrics["seen"] == 3 and metrics["pass_rate"] == 0.5
    drawn = {name: metrics[name] for name in ("new", "hard", "medium", "easy")}
    assert drawn == {"new": 5 / 8, "hard": 1 / 8, "medium": 1 / 8, "easy": 1 / 8}
    assert sampler.metrics().keys() == {"seen", "pass_rate", "source_weight"}


def test_a_target_without_an_effect_is_refused() -> None:
    with pytest.raises(OptionError, match=r"target 0.8 given, but prefer 'failed' has none"):
        rlsdk.load("sampler", "by_pass_rate", prefer="failed", target=0.8)


def test_it_draws_the_same_after_a_restore() -> None:
    sampler, again = ByPassRate(source_window=5), ByPassRate(source_window=5)
    for index in range(50):
        sampler.note(index, group(*np.random.default_rng(index).integers(0, 2, 4).astype(float)))
    again.restore(json.loads(json.dumps(sampler.state())))
    assert again.source_weight() == sampler.source_weight() < 1
    for seed in range(20):
        draws = [each.draw(np.arange(60), np.random.default_rng(seed)) for each in (sampler, again)]
        assert draws[0] == draws[1]
