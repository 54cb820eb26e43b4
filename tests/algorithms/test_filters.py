"""Filters: which groups, and which part of a group, are trained on."""

from __future__ import annotations

import attrs
import pytest

import rlsdk
from rlsdk.types import Group, Rollout, Score, Task

TASK = Task("t", "prompt")


def group(*values: float | None, truncated: tuple[int, ...] = ()) -> Group:
    """A group with these rewards; None is a rollout that could not be scored."""
    statuses = ["truncated" if i in truncated else "finished" for i in range(len(values))]
    rollouts = [Rollout.from_text(TASK, str(i), status) for i, status in enumerate(statuses)]
    return Group(TASK, rollouts, [Score.invalid("timeout") if v is None else Score(v) for v in values])


def kept(name: str, given: Group, **options):
    """True, False, or the texts of the rollouts that are left."""
    found = rlsdk.load("filter", name, **options)(given)
    return [r.text for r in found.rollouts] if isinstance(found, Group) else found


@pytest.mark.parametrize(
    "name, options, values, expected",
    [
        ("nonzero_variance", {}, (1.0, 0.0), True),
        ("nonzero_variance", {}, (1.0, 1.0), False),
        ("nonzero_variance", {}, (1.0, None), False),
        ("nonzero_variance", {}, (), False),
        ("pass_rate", {}, (1.0, 0.1), True),
        ("pass_rate", {}, (0.1, 0.0), False),
        ("pass_rate", {}, (1.0, 1.0, None), False),
        ("pass_rate", {"low": 0.3, "high": 0.7}, (1.0, 1.0, 1.0, 0.0), False),
        ("pass_rate", {"low": 0.3, "high": 0.7}, (1.0, 1.0, 0.0, 0.0), True),
        ("pass_rate", {"low": -1.0}, (0.0, 0.0), True),
        ("pass_rate", {"passing": 0.1}, (0.1, 0.0), True),
        ("pass_rate", {}, (None,), False),
        ("min_std", {}, (1.0, 0.9), True),
        ("min_std", {}, (0.1, 0.1, 0.1), False),
        ("min_std", {"threshold": 0.1}, (1.0, 0.9), False),
        ("min_std", {"threshold": 0.1}, (1.0, 0.0), True),
        ("min_std", {}, (1.0,), False),
        ("top_k", {}, (0.0, 1.0, 1.0), ["1"]),
        ("top_k", {"k": 2}, (0.0, None, 1.0, 0.5), ["2", "3"]),
        ("top_k", {"k": 9}, (0.0, 1.0), ["0", "1"]),
        ("top_k", {}, (None, None), False),
        ("best_worst", {}, (0.5, 0.0, 1.0), ["2", "1"]),
        ("best_worst", {}, (0.5, 0.5), False),
        ("best_worst", {}, (0.5, None), False),
    ],
)
def test_by_reward(name, options, values, expected):
    assert kept(name, group(*values), **options) == expected


def test_truncated_rollouts_leave():
    assert kept("truncated", group(1.0, 0.0, 0.5, truncated=(1,))) == ["0", "2"]
    assert kept("truncated", group(1.0, 0.0, truncated=(0, 1))) is False


def test_trajectories_of_several_rollouts_are_taken_or_left_whole():
    names, statuses = "aabbbc", ["finished", "truncated", *["finished"] * 4]
    rollouts = [
        attrs.evolve(Rollout.from_text(TASK, f"{name}{i}", status), trajectory=name, step=i)
        for i, (name, status) in enumerate(zip(names, statuses, strict=True))
    ]
    values = (0.0, 0.0, 1.0, 1.0, 1.0, 0.5)
    steps = Group(TASK, rollouts, [Score(value) for value in values])
    assert kept("truncated", steps) == ["b2", "b3", "b4", "c5"]
    assert kept("top_k", steps) == ["b2", "b3", "b4"]
    assert kept("top_k", steps, k=2) == ["b2", "b3", "b4", "c5"]
    assert kept("best_worst", steps) == ["b4", "a1"]
    assert kept("pass_rate", steps, low=0.3, high=0.4)
    assert not kept("pass_rate", steps, low=0.4)
