"""Rollouts that never wait for training: tasks start as the trainer's wants allow, groups are handed over in batches.

One machine for all modes. With nothing asked for ahead of the step it is synchronous: a step's tasks start together,
and the next ones when their groups have been trained. With more, tasks run on while the trainer works.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, Protocol

import attrs

from rlsdk.rollout.lifecycle import Lifecycle, State, Ticket
from rlsdk.rollout.staleness import staleness
from rlsdk.types import Group, Task


@attrs.frozen(kw_only=True)
class Pace:
    """How far rollouts may run ahead.

    Attributes:
        ahead: Batches beyond the present step's that are asked for.
        limit: Staleness from which on a group is never trained.
        oversample: Reserve of tasks that run beside those that are wanted, as a share of a batch.
    """

    ahead: int = 0
    limit: int = 1
    oversample: float = 0.0


class Streams(Protocol):
    """Sources of tasks, as `rollout.stream.TaskStreams` has them."""

    @property
    def names(self) -> Sequence[str]:
        """Of the sources."""
        ...

    def divide(self, count: int) -> Mapping[str, int]:
        """How many of the next `count` tasks each source gives; called once for each batch, in order."""
        ...

    def draw(self, source: str) -> tuple[Task, int]:
        """A fresh task, and its position."""
        ...

    def at(self, source: str, position: int) -> Task:
        """A task that was drawn before."""
        ...


class Production:
    """Starts tasks, keeps their groups, gives batches to the trainer."""

    def __init__(
        self,
        lifecycle: Lifecycle,
        pace: Pace,
        *,
        batch: int,
        streams: Streams,
        make: Callable[[Ticket], Awaitable[Group]],
        wanted: Callable[[Group], bool] = lambda group: True,
    ) -> None:
        """Make one; nothing runs before the first `take`.

        Args:
            lifecycle: Of its tasks.
            pace: How far ahead.
            streams: Where tasks come from, and how a batch is divided among them.
            batch: Groups of a batch.
            make: The scored group of a task; what it raises ends the run.
            wanted: Whether a group may be trained on; another task takes the place of one that may not.
        """
        self._book, self._pace = lifecycle, pace
        self._streams, self._batch, self._make, self._wanted = streams, batch, make, wanted
        self._batches: dict[int, Mapping[str, int]] = {}
        self._asked = 0
        self._running: set[asyncio.Task[None]] = set()
        self._changed = asyncio.Event()
        self._failure: BaseException | None = None
        self._paused = False
        self.expired = 0

    async def take(self, step: int) -> list[Ticket]:
        """The batch of a step, as soon as all of it is there; its groups are the oldest that have not expired.

        Args:
            step: Steps that are done.

        Raises:
            BaseException: What `make` raised first, with its traceback.
        """
        self._paused = False
        batch = self._ask(step)
        self._expire(step)
        while True:
            if self._failure is not None:
                raise self._failure
            self._changed.clear()
            self._fill()
            if self._enough(batch):
                self._expire(step)  # what was begun long ago may be too old when it comes
                if self._enough(batch):
                    break
            else:
                await self._changed.wait()
        taken = [ticket for source, count in batch.items() for ticket in self._available(source)[:count]]
        for ticket in taken:
            self._book.take(ticket)
        del self._batches[step]
        self._fill()
        return taken

    def settle(self, tickets: Sequence[Ticket], states: Sequence[State]) -> None:
        """Say what became of tickets that were taken: trained, filtered or failed."""
        for ticket, state in zip(tickets, states, strict=True):
            self._book.move(ticket, state)

    def state(self) -> dict[str, Any]:
        """What was asked for, and the tasks that have not ended, as plain JSON; their groups are made again."""
        return {
            "asked": self._asked,
            "batches": {str(step): dict(parts) for step, parts in self._batches.items()},
            "on_the_way": {
                source: sorted(t.position for t in self._book.tickets(source, *State)) for source in self._streams.names
            },
            "ended": self._book.state(),
        }

    def restore(self, state: Mapping[str, Any]) -> int:
        """Go on from `state()`; how many tasks on their way are made again. Those of a source that is gone are not."""
        self._asked = state["asked"]
        self._batches = {int(step): parts for step, parts in state["batches"].items()}
        self._book.restore(state["ended"])
        again = 0
        for source, positions in state["on_the_way"].items():
            if source not in self._streams.names:
                continue
            for position in positions:
                self._book.issue(source, self._streams.at(source, position), position)
            again += len(positions)
        return again

    async def pause(self) -> int:
        """Start nothing more and end what runs; its tasks are started again by the next `take`. How many there were."""
        self._paused = True
        running = list(self._running)
        for task in running:
            task.cancel()
        if running:
            await asyncio.wait(running)
        return len(running)

    def _ask(self, step: int) -> Mapping[str, int]:
        """Want all batches up to the one of `step`, and those ahead of it; the parts of that of `step`."""
        while self._asked <= step + self._pace.ahead:
            parts = self._batches[self._asked] = dict(self._streams.divide(self._batch))
            for source, count in parts.items():
                self._book.ask(source, self._book.counts(source).target + count)
            self._asked += 1
        return self._batches[step]

    def _enough(self, batch: Mapping[str, int]) -> bool:
        return all(self._book.counts(source).available >= count for source, count in batch.items())

    def _available(self, source: str) -> list[Ticket]:
        return [t for t in self._book.tickets(source, State.COMPLETED) if not t.taken]

    def _expire(self, step: int) -> None:
        for source in self._streams.names:
            for ticket in self._available(source):
                if ticket.group is not None and staleness(ticket.group, step) >= self._pace.limit:
                    self._book.move(ticket, State.EXPIRED)
                    self.expired += 1

    def _fill(self) -> None:
        if self._paused:
            return
        for source in self._streams.names:
            batch = self._batches[min(self._batches)].get(source, 0) if self._batches else 0
            wanted = self._book.wanted(source, batch, self._pace.oversample)
            again = self._book.tickets(source, State.EXPIRED, State.ABORTED, State.INIT)[:wanted] if wanted else []
            for i in range(wanted):
                fresh = i >= len(again)
                self._start(self._book.issue(source, *self._streams.draw(source)) if fresh else again[i])

    def _start(self, ticket: Ticket) -> None:
        self._book.move(ticket, State.RUNNING)
        running = asyncio.get_running_loop().create_task(self._run(ticket))
        self._running.add(running)
        running.add_done_callback(self._running.discard)

    async def _run(self, ticket: Ticket) -> None:
        try:
            group = await self._make(ticket)
        except asyncio.CancelledError:
            self._book.move(ticket, State.ABORTED)
        except BaseException as error:  # noqa: BLE001 - whoever takes gets it
            self._failure = self._failure or error
        else:
            self._book.move(ticket, State.COMPLETED if self._wanted(group) else State.FILTERED, group)
        finally:
            self._changed.set()
