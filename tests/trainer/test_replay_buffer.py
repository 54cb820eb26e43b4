"""Replayed groups: which, how often, never too old, and restored from a checkpoint."""

from __future__ import annotations

import json
from collections.abc import Callable

from rlsdk.algorithms.buffers import fifo, stalest_first
from rlsdk.rollout.staleness import staleness
from rlsdk.trainer.ledger import ReplayBuffer, ReplayedGroup
from rlsdk.types import Group, Rollout, Score, Task


def used(number: int, version: int, reward: float = 1.0) -> ReplayedGroup:
    task = Task(f"a{number}", "p")
    rollout = Rollout(task, (), [1, 2], [False, True], [0.0, -1.0], [-1, version])
    group = Group(task, [rollout], [Score(reward)])
    return ReplayedGroup(number=number, source="a", position=number, step=version + 1, group=group, baseline=0.5)


def below(limit: int) -> Callable[[Group, int], Group | None]:
    return lambda group, step: group if staleness(group, step) < limit else None


def drawn(experience: ReplayBuffer, step: int) -> list[int]:
    """Numbers of the groups that a step draws, and trains on again."""
    again = experience.draw(step)
    experience.add([], again)
    return [each.number for each in again]


def test_a_group_is_used_as_often_as_allowed_and_the_least_used_first() -> None:
    experience = ReplayBuffer(fifo, count=2, most_uses=3, young=below(99))
    assert drawn(experience, 0) == []
    experience.add([used(n, 0) for n in range(3)])
    assert [drawn(experience, step) for step in range(1, 6)] == [[0, 1], [2, 0], [1, 2], [], []]
    assert experience.held == []


def test_a_step_that_fails_uses_nothing_up() -> None:
    experience = ReplayBuffer(fifo, count=1, most_uses=2, young=below(9))
    experience.add([used(0, 0)])
    for _ in range(3):  # tried again and again
        assert [(each.number, each.uses) for each in experience.draw(1)] == [(0, 2)]
    assert [each.uses for each in experience.held] == [1]


def test_nothing_too_old_is_used_and_nothing_too_old_is_held() -> None:
    experience = ReplayBuffer(stalest_first, count=4, most_uses=99, young=below(3))
    experience.add([used(0, 0), used(1, 2), used(2, 1)])
    assert drawn(experience, 2) == [0, 2, 1]
    assert drawn(experience, 3) == [2, 1]
    assert drawn(experience, 5) == []
    assert experience.held == []


def test_what_the_policy_drops_is_not_used() -> None:
    good = lambda group, *, step, uses: group.scores[0].value or None  # noqa: E731
    experience = ReplayBuffer(good, count=4, most_uses=99, young=below(9))
    experience.add([used(0, 0, reward=0.0), used(1, 0, reward=2.0)])
    assert drawn(experience, 1) == [1]


def test_without_a_share_nothing_is_held() -> None:
    experience = ReplayBuffer(fifo, count=0, most_uses=2, young=below(9))
    experience.add([used(0, 0)])
    assert experience.held == []


def test_a_task_that_is_drawn_again_is_not_mistaken_for_a_replayed_one() -> None:
    """The ledger tells groups of one task apart by their uid."""
    experience, first = ReplayBuffer(fifo, count=1, most_uses=2, young=below(9)), used(0, 0)
    experience.add([first])
    (again,) = experience.draw(1)
    fresh = Group(first.group.task, first.group.rollouts, first.group.scores)
    assert again.group.uid == first.group.uid != fresh.uid


def test_it_continues_from_a_checkpoint() -> None:
    before = ReplayBuffer(fifo, count=1, most_uses=3, young=below(9))
    before.add([used(n, 0) for n in range(3)])
    assert drawn(before, 1) == [0]
    groups = {u.number: u.group for u in before.held if u.number != 2}
    after = ReplayBuffer(fifo, count=1, most_uses=3, young=below(9))
    state = json.loads(json.dumps(before.state()))
    assert after.places(state) == {n: ("a", n) for n in range(3)}
    after.restore(state, groups)
    assert [(u.number, u.uses, u.baseline, u.step) for u in after.held] == [(0, 2, 0.5, 1), (1, 1, 0.5, 1)]
    assert drawn(after, 1) == [1]
