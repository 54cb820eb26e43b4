"""Orders for groups, the groups that are made, and the interface of whatever makes them: this process or workers."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Literal, Protocol

import attrs

from rlsdk.cluster.draining import DrainingNode
from rlsdk.contracts import Sampling
from rlsdk.rollout.production import Pausable
from rlsdk.types import Group, Task

MOST_REASONS = 20
"""Number of reasons in the summary."""


@attrs.frozen(kw_only=True, eq=False)
class GroupOrder:
    """A group that is wanted.

    Attributes:
        task: Task to solve.
        key: Name of the group, its `uid`; every seed depends on it.
        size: Rollouts in the group.
        role: Used for training, in an evaluation, or as an expert's demonstration.
        sampling: Sampling parameters; None for those of the training.
        step: Training step that the rollouts are for; -1 for none.
        before: Group that an aborted attempt left.
        baseline: Make a greedy answer, too, whose reward is a baseline.
    """

    task: Task
    key: str
    size: int
    role: Literal["train", "evaluation", "expert"] = "train"
    sampling: Sampling | None = None
    step: int = -1
    before: Group | None = None
    baseline: bool = False


@attrs.frozen(eq=False)
class MadeGroup:
    """A group that was made; `baseline` is the reward of the greedy answer, if there is one that could be scored."""

    group: Group
    baseline: float | None = None


@attrs.frozen
class MakerCounters:
    """Counts of what makes groups since it began.

    Attributes:
        wasted: Tokens that were sampled and belong to no rollout.
        sampled_again: Continuations that were requested again, since their engine died.
        run_again: Rollouts that were restarted, since the worker of their environment died.
        environments_lost: Number of workers of environments that were lost.
        reasons: Why, for the first ones.
    """

    wasted: int = 0
    sampled_again: int = 0
    run_again: int = 0
    environments_lost: int = 0
    reasons: tuple[str, ...] = ()

    def __add__(self, other: MakerCounters) -> MakerCounters:
        """Add up the counts of two makers."""
        return MakerCounters(
            self.wasted + other.wasted,
            self.sampled_again + other.sampled_again,
            self.run_again + other.run_again,
            self.environments_lost + other.environments_lost,
            (*self.reasons, *other.reasons)[:MOST_REASONS],
        )


class GroupMaker(Protocol):
    """Makes groups: in this process (`workers.local.LocalMaker`), or in others (`workers.pool.RolloutWorkerPool`).

    Attributes:
        failures: A sentence for each process that died while it made groups.
    """

    failures: list[str]

    @property
    def pausable(self) -> Pausable | None:
        """Interrupts what is being sampled; None where nothing is sampled."""
        ...

    async def make(self, order: GroupOrder) -> MadeGroup:
        """Sample and score a group.

        Raises:
            UnfinishedError: It was interrupted; the error has the part that was sampled.
            RlsdkError: The task cannot be used, or generation failed.
        """
        ...

    def held(self) -> AbstractAsyncContextManager[None]:
        """Interrupt what is being sampled before a block, and resume it afterwards."""
        ...

    def counters(self) -> MakerCounters:
        """Return the counts so far."""
        ...

    async def leave(self, nodes: Sequence[DrainingNode]) -> None:
        """Begin to move the processes that make groups away from nodes that are to leave the cluster."""
        ...


async def made_in_order(maker: GroupMaker, orders: Iterable[GroupOrder]) -> list[Group]:
    """Return groups that are made side by side, in the order of their orders; for errors see `GroupMaker.make`."""
    async with asyncio.TaskGroup() as running:
        made = [running.create_task(maker.make(order)) for order in orders]
    return [each.result().group for each in made]
