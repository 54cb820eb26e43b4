"""Orders for groups, finished groups, and the interface of group makers: this process or workers.

Workers get commands and send reports, which are the messages here.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Any, Literal, Protocol

import attrs

from rlsdk.cluster.nodes import DrainingNode
from rlsdk.contracts import Sampling
from rlsdk.rollout.scheduler import Pausable
from rlsdk.types import Group, Rollout, Score, Task

MOST_REASONS = 20
"""Maximum number of reasons in the summary."""


@attrs.frozen(kw_only=True, eq=False)
class GroupOrder:
    """An order for a group.

    Attributes:
        task: Task to solve.
        key: Name of the group, its `uid`; every seed depends on it.
        size: Number of rollouts in the group.
        role: Use of the group: training, evaluation, or expert demonstration.
        sampling: Sampling parameters; None for those of training.
        step: Training step that the rollouts are for; -1 for none.
        before: Partial group of an aborted attempt.
        baseline: True to sample a greedy answer, too, whose reward is the baseline.
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
    """A finished group; `baseline` is the reward of the greedy answer, if there is one with a valid score."""

    group: Group
    baseline: float | None = None


@attrs.frozen
class MakerCounters:
    """Counters of a group maker since its start.

    Attributes:
        wasted: Number of sampled tokens that belong to no rollout.
        sampled_again: Number of continuations that were requested again after their engine died.
        run_again: Number of rollouts that were restarted after their environment's worker died.
        environments_lost: Number of lost environment workers.
        reasons: Reasons of the first losses.
    """

    wasted: int = 0
    sampled_again: int = 0
    run_again: int = 0
    environments_lost: int = 0
    reasons: tuple[str, ...] = ()

    def __add__(self, other: MakerCounters) -> MakerCounters:
        """Add the counters of two makers."""
        return MakerCounters(
            self.wasted + other.wasted,
            self.sampled_again + other.sampled_again,
            self.run_again + other.run_again,
            self.environments_lost + other.environments_lost,
            (*self.reasons, *other.reasons)[:MOST_REASONS],
        )


class GroupMaker(Protocol):
    """Group maker: in this process (`workers.local.LocalMaker`), or in others (`workers.pool.RolloutWorkerPool`).

    Attributes:
        failures: A sentence for each process that died while it made groups.
    """

    failures: list[str]

    @property
    def pausable(self) -> Pausable | None:
        """Interrupts sampling; None if nothing is sampled."""
        ...

    async def make(self, order: GroupOrder) -> MadeGroup:
        """Sample and score a group.

        Raises:
            UnfinishedError: It was interrupted; the error holds the sampled part.
            RlsdkError: The task cannot be used, or generation failed.
        """
        ...

    def held(self) -> AbstractAsyncContextManager[None]:
        """Interrupt sampling for the duration of a block."""
        ...

    def counters(self) -> MakerCounters:
        """Return the counters so far."""
        ...

    def state(self) -> dict[str, Any]:
        """Return the state of rewards that keep one, by name, as plain JSON."""
        ...

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restore the state of rewards from `state()`."""
        ...

    async def leave(self, nodes: Sequence[DrainingNode]) -> None:
        """Start moving the processes that make groups off draining nodes."""
        ...


async def made_in_order(maker: GroupMaker, orders: Iterable[GroupOrder]) -> list[Group]:
    """Make groups concurrently, and return them in the order of `orders`; for errors, see `GroupMaker.make`."""
    async with asyncio.TaskGroup() as running:
        made = [running.create_task(maker.make(order)) for order in orders]
    return [each.result().group for each in made]


@attrs.frozen(eq=False)
class Make:
    """Make a group; answered by `Made`, or by an exception."""

    number: int
    order: GroupOrder


@attrs.frozen
class Cancel:
    """Cancel a group; there is no answer."""

    number: int


@attrs.frozen(eq=False)
class Admit:
    """Send requests to an engine; `incarnation` distinguishes its actor from earlier ones of the same rank."""

    rank: int
    incarnation: int
    actor: Any


@attrs.frozen
class Dismiss:
    """Send no further requests to an engine."""

    rank: int


@attrs.frozen
class Drain:
    """Send no further requests to an engine; answered by None once its current requests are answered."""

    number: int
    rank: int


@attrs.frozen
class Hold:
    """Interrupt sampling; answered by None once it has stopped. `Resume` resumes it."""

    number: int


@attrs.frozen
class Resume:
    """End a `Hold`."""


@attrs.frozen
class Interrupt:
    """Stop sampling with partial answers until `Release`."""


@attrs.frozen
class Release:
    """End an `Interrupt`."""


Command = Make | Cancel | Admit | Dismiss | Drain | Hold | Resume | Interrupt | Release


@attrs.frozen(eq=False)
class Made:
    """A finished group.

    Attributes:
        made: The group.
        unfinished: True if it was interrupted.
        seen: New rollouts, with score and step, in the order in which an observer would have seen them.
    """

    made: MadeGroup
    unfinished: bool = False
    seen: tuple[tuple[Rollout, Score, int], ...] = ()


@attrs.frozen
class EngineDied:
    """An engine was found dead."""

    rank: int
    incarnation: int
    reason: str


@attrs.frozen
class Logged:
    """A line of the worker's log, to be copied to the run's log."""

    logger: str
    level: int
    text: str


@attrs.frozen
class Spent:
    """A span of the run's trace that ends now, since clocks of machines differ; see `SpanRecorder.add`."""

    actor: str
    name: str
    seconds: float
    counts: dict[str, float]


Notice = EngineDied | Logged | Spent


@attrs.frozen(eq=False)
class WorkerReport:
    """A message to the driver.

    Attributes:
        counters: Counters of the worker so far.
        answers: Number of a command, and its answer.
        notices: Unsolicited notices.
    """

    counters: MakerCounters
    answers: list[tuple[int, Any]]
    notices: list[Notice]
