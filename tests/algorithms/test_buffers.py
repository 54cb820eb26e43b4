"""Buffer policies: which groups are trained first, and which never."""

from __future__ import annotations

from typing import Any

import pytest

import rlsdk
from rlsdk.errors import OptionError
from rlsdk.types import Group, Rollout, Score, Task

TASK = Task("t", "prompt")


def group(*values: float | None, versions: tuple[int, ...] = (), **metrics: float) -> Group:
    """A group with these rewards (None: invalid), sampled by these versions, which all its rollouts share."""
    mask, logprobs = [v >= 0 for v in versions], [0.0] * len(versions)
    rollouts = [Rollout(TASK, (), [1] * len(versions), mask, logprobs, versions) for _ in values]
    scores = [Score.invalid("timeout") if v is None else Score(v, metrics=metrics) for v in values]
    return Group(TASK, rollouts, scores)


def given(name: str, held: Group, step: int = 5, uses: int = 0, **options: Any) -> float | None:
    return rlsdk.load("buffer", name, **options)(held, step=step, uses=uses)


def test_fifo_leaves_the_order_of_issue_and_prefers_what_was_used_least():
    assert given("fifo", group(1.0, versions=(1,))) == given("fifo", group(0.0, versions=(4,)))
    assert given("fifo", group(1.0), uses=1) > given("fifo", group(1.0), uses=2)


def test_stalest_first_counts_from_the_oldest_token():
    assert given("stalest_first", group(1.0, 0.0, versions=(-1, 4, 2, 3))) == 3.0
    assert given("stalest_first", group(1.0, versions=(-1, -1))) == 0.0
    assert given("stalest_first", group()) == 0.0


@pytest.mark.parametrize(
    "values, options, expected",
    [
        ((1.0, 0.0), {}, 0.5 - 0.2),
        ((1.0, 1.0), {}, -0.2),
        ((1.0, None), {}, -0.2),
        ((None, None), {}, -0.2),
        ((1.0, 0.0), {"age_decay": 0.0}, 0.5),
        ((1.0, 0.0, 0.5), {"by": "reward", "age_decay": 0.0}, 0.5),
        ((1.0, 0.0), {"by": "reward", "sign": -1.0, "age_decay": 0.0}, -0.5),
        ((1.0, 0.0), {"by": "hard", "age_decay": 0.0}, 7.0),
        ((1.0, 0.0), {"by": "no such metric", "age_decay": 0.0}, 0.0),
        ((1.0, 1.0), {"least": 0.1}, None),
        ((1.0, 0.0), {"least": 0.1, "age_decay": 0.0}, 0.5),
        ((1.0, 0.0), {"by": "reward", "sign": -1.0, "least": -0.4}, None),
    ],
)
def test_priority(values, options, expected):
    found = given("priority", group(*values, versions=(-1, 3), hard=7.0), **options)
    assert found == (None if expected is None else pytest.approx(expected))


def test_priority_falls_with_every_use_and_every_step():
    held = group(1.0, 0.0, versions=(0,))
    assert given("priority", held, step=2, uses=3, age_decay=0.25, use_decay=2.0) == pytest.approx(0.5 - 0.5 - 6.0)


def test_arguments_supplied_by_rlsdk_are_not_options():
    with pytest.raises(OptionError, match="unknown option 'step'"):
        rlsdk.load("buffer", "fifo", step=3)
    assert [o.name for o in rlsdk.Plugins().find("buffer", "priority")[1].options][:2] == ["by", "sign"]


@pytest.mark.parametrize(
    ("share", "least"),
    [(0.5, 5), (0.75, 8), (0.01, 1), (1.0, 10), (3.0, 10), (-1.0, 1)],
)
def test_a_share_of_the_batch_is_enough(share, least):
    rule = rlsdk.load("stop", "enough", share=share)
    assert [n for n in range(11) if rule(available=n, target=10)] == list(range(least, 11))


def test_a_share_that_makes_a_whole_number_is_that_number():
    for share, target, least in ((0.55, 20, 11), (0.07, 100, 7), (0.8, 35, 28)):
        rule = rlsdk.load("stop", "enough", share=share)
        assert rule(available=least, target=target) and not rule(available=least - 1, target=target)


def test_all_waits_for_all():
    rule = rlsdk.load("stop", "all")
    assert [n for n in range(5) if rule(available=n, target=4)] == [4]


def test_arguments_of_each_call_are_not_options():
    component = rlsdk.plugins.Plugins().find("stop", "enough")[1]
    assert [option.name for option in component.options] == ["share"]
