"""Rollouts that never wait for training: tasks start as the trainer's wants allow, groups are handed over in batches.

One machine for all modes. With nothing asked for ahead of the step it is synchronous: a step's tasks start together,
and the next ones when their groups have been trained. With more, tasks run on while the trainer works.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, Protocol

import attrs

from rlsdk.rollout.lifecycle import Lifecycle, State, Ticket
from rlsdk.rollout.staleness import is_trainable, staleness, without_old
from rlsdk.types import Group, Task

AGAIN = 2.0
"""Seconds after which what still runs is told once more to end."""


class UnfinishedError(Exception):
    """A task was stopped; its `group` is what there is, and its task is started again."""

    def __init__(self, group: Group) -> None:
        super().__init__(f"task {group.task.id!r} was stopped from outside")
        self.group = group


@attrs.frozen(kw_only=True)
class Pace:
    """How far rollouts may run ahead.

    Attributes:
        ahead: Batches beyond that of the last sync's step that are asked for.
        interval: Steps between two syncs. What is begun between them has the weights of the last, and is as old as what
            was begun with it.
        limit: Staleness from which on a group is never trained.
        oversample: Reserve of tasks that run beside those that are wanted, as a share of a batch.
        token_limit: Staleness from which on a token is left out of the loss; None: of no token.
        tail: How many expired groups of a source make its next tasks: these first, then those aborted, then fresh ones,
            without a reserve. 0: expired groups are made again at once; -1: never.
    """

    ahead: int = 0
    interval: int = 1
    limit: int = 1
    oversample: float = 0.0
    token_limit: int | None = None
    tail: int = 0

    def trimmed(self, group: Group, step: int) -> Group:
        """The group without the tokens that are too old to be trained at a step."""
        return without_old(group, step, None if self.token_limit is None else self.token_limit - 1)

    def expires(self, group: Group, step: int) -> bool:
        """Whether a group is too old to be trained at a step."""
        young = self.trimmed(group, step)
        return staleness(young, step) >= self.limit or (is_trainable(group) and not is_trainable(young))

    def young(self, group: Group, step: int) -> Group | None:
        """What of a group may be trained at a step; None if it is too old."""
        return None if self.expires(group, step) else self.trimmed(group, step)


Recall = Callable[[Mapping[int, Task]], Mapping[int, Group]]
"""Number of a ticket -> its task, to number -> the group that was made of it."""


class Policy(Protocol):
    """A buffer policy, as components of the kind `buffer` are."""

    def __call__(self, group: Group, /, *, step: int, uses: int) -> float | None:
        """Priority of a group, the greatest first; None drops it."""
        ...


def first_come(group: Group, /, *, step: int, uses: int) -> float:
    """The policy that prefers none: tasks are trained in the order of issue."""
    return 0.0


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


class Valve(Protocol):
    """What ends the sampling of running tasks, as `rollout.gate.Gate`."""

    def interrupt(self) -> None:
        """End what is sampled, and all that is asked for from now on; tasks that run get what there is."""
        ...

    def release(self) -> None:
        """Have answers sampled again."""
        ...


class Production:
    """Starts tasks, keeps their groups, gives batches to the trainer.

    Attributes:
        expired: Groups that became too old.
        failure: What `make` raised first.
    """

    def __init__(
        self,
        lifecycle: Lifecycle,
        pace: Pace,
        *,
        batch: int,
        streams: Streams,
        make: Callable[[Ticket], Awaitable[Group]],
        wanted: Callable[[Group], bool] = lambda group: True,
        policy: Policy = first_come,
        stop: Callable[..., bool] | None = None,
        valve: Valve | None = None,
    ) -> None:
        """Make one; nothing runs before the first `take`.

        Args:
            lifecycle: Of its tasks.
            pace: How far ahead.
            streams: Where tasks come from, and how a batch is divided among them.
            batch: Groups of a batch.
            make: The scored group of a task, going on from the ticket's group, where there is one. What it raises
                ends the run, but for `UnfinishedError`.
            wanted: Whether a group may be trained on; another task takes the place of one that may not.
            policy: Which of the groups that are there come first; one that it drops counts as filtered, and another
                task takes its place.
            stop: Whether a batch of which `available` groups of `target` are there is enough; None: all of them are.
            valve: Ends the sampling of running tasks; without one, a pause cancels them at once.
        """
        self._book, self._pace, self._policy = lifecycle, pace, policy
        self._streams, self._batch, self._make, self._wanted = streams, batch, make, wanted
        self._stop, self._valve = stop, valve
        self._batches: dict[int, Mapping[str, int]] = {}
        self._asked = 0
        self._owed: dict[str, int] = dict.fromkeys(streams.names, 0)
        self._running: set[asyncio.Task[tuple[State, Group]]] = set()
        self._changed = asyncio.Event()
        self._paused = False
        self._tails: frozenset[str] = frozenset()
        self.failure: BaseException | None = None
        self.expired = 0
        self.dropped = 0

    async def take(self, step: int) -> list[Ticket]:
        """The batch of a step, as soon as all of it is there, or enough: what the policy puts first.

        Args:
            step: Steps that are done.

        Returns:
            At least one.

        Raises:
            BaseException: What `make` raised first, with its traceback; no group is taken then.
        """
        self._resume()
        batch = self._ask(step)
        self._sift(step)
        self._tails = frozenset(s for s in self._streams.names if self._has_tail(s))
        while True:
            if self.failure is not None:
                raise self.failure
            self._changed.clear()
            self._fill()
            if self._enough(batch):
                ranks = self._sift(step)  # what was begun long ago may be too old when it comes
                if self._enough(batch):
                    break
            else:
                await self._changed.wait()
        taken = [ticket for source, count in batch.items() for ticket in ranks[source][:count]]
        for ticket in taken:
            self._hand_over(ticket, step)
        for source, count in batch.items():  # what did not come in time is for the batches that follow
            self._owed[source] += count - sum(ticket.source == source for ticket in taken)
        del self._batches[step]
        self._fill()
        return taken

    def settle(self, tickets: Sequence[Ticket], states: Sequence[State]) -> None:
        """Say what became of tickets that were taken: trained, filtered or failed."""
        for ticket, state in zip(tickets, states, strict=True):
            self._book.move(ticket, state)

    def state(self) -> dict[str, Any]:
        """What was asked for, and the tasks that have not ended, as plain JSON; of these, `kept` have their groups."""
        return {
            "asked": self._asked,
            "owed": dict(self._owed),
            "batches": {str(step): dict(parts) for step, parts in self._batches.items()},
            "on_the_way": {
                source: sorted(t.position for t in self._book.tickets(source, *State)) for source in self._streams.names
            },
            "kept": [[t.source, t.position, t.number] for t in self.available()],
            "ended": self._book.state(),
        }

    def available(self) -> list[Ticket]:
        """Those whose groups wait for the trainer."""
        return [ticket for source in self._streams.names for ticket in self._available(source)]

    def restore(self, state: Mapping[str, Any], recall: Recall = lambda tasks: {}) -> int:
        """Go on from `state()`; how many tasks on their way are made again. Those of a source that is gone are not.

        Args:
            state: From `state`.
            recall: Gives groups that were there, by the numbers of their tickets; what it lacks is made again.
        """
        self._asked = state["asked"]
        self._owed |= {name: count for name, count in state.get("owed", {}).items() if name in self._owed}
        self._batches = {int(step): parts for step, parts in state["batches"].items()}
        self._book.restore(state["ended"])
        kept = {n: (s, p, self._streams.at(s, p)) for s, p, n in state.get("kept", ()) if s in self._streams.names}
        groups = recall({number: task for number, (_, _, task) in kept.items()})
        for number, group in sorted(groups.items()):
            source, position, task = kept[number]
            ticket = self._book.issue(source, task, position, number)
            self._book.move(ticket, State.RUNNING)
            self._book.move(ticket, State.COMPLETED, group)
        back = {kept[number][:2] for number in groups}
        ways = [(s, p) for s, found in state["on_the_way"].items() for p in found if s in self._streams.names]
        again = [way for way in ways if way not in back]
        for source, position in again:
            self._book.issue(source, self._streams.at(source, position), position)
        return len(again)

    async def pause(self, seconds: float = 0.0, *, again: float = AGAIN) -> int:
        """Start nothing more and end what runs; the next `take` starts it again, from what there is of it.

        What is being sampled is ended, and tasks finish with what they have. Those that do not are cancelled, and begin
        anew.

        Args:
            seconds: Tasks that have not ended by then are cancelled.
            again: Seconds after which what still runs is told once more to end.

        Returns:
            How many tasks ran.
        """
        self._paused = True
        running = list(self._running)
        loop = asyncio.get_running_loop()
        until = loop.time() + seconds
        while self._valve is not None and self._running and (left := until - loop.time()) > 0:
            self._valve.interrupt()
            await asyncio.wait(self._running, timeout=min(again, left))
        for task in self._running:
            task.cancel()
        if self._running:
            await asyncio.wait(self._running)
        return len(running)

    def _resume(self) -> None:
        self._paused = False
        if self._valve is not None:
            self._valve.release()

    def _ask(self, step: int) -> Mapping[str, int]:
        """Want all batches that what is begun now can be young enough for; the parts of that of `step`."""
        while self._asked <= step - step % self._pace.interval + self._pace.ahead:
            parts = self._batches[self._asked] = dict(self._streams.divide(self._batch))
            for source, count in parts.items():
                owed = min(self._owed[source], count)
                self._owed[source] -= owed
                self._book.ask(source, self._book.counts(source).target + count - owed)
            self._asked += 1
        return self._batches[step]

    def _enough(self, batch: Mapping[str, int]) -> bool:
        there = {source: min(count, self._book.counts(source).available) for source, count in batch.items()}
        available, target = sum(there.values()), sum(batch.values())
        if available == target or self._stop is None:
            return available == target
        return available > 0 and bool(self._stop(available=available, target=target))

    def _available(self, source: str) -> list[Ticket]:
        return [t for t in self._book.tickets(source, State.COMPLETED) if not t.taken]

    def _hand_over(self, ticket: Ticket, step: int) -> None:
        ticket.group = self._pace.trimmed(self._book.take(ticket), step)

    def _sift(self, step: int) -> dict[str, list[Ticket]]:
        """Let go of what is too old and of what the policy drops; the rest of each source, the first to train first.

        The policy is asked anew for each step, since priorities change with it: work in proportion to what waits, which
        the trainer's wants bound to a few batches, whatever the length of the run.
        """
        found: dict[str, list[Ticket]] = {}
        for source in self._streams.names:
            ranked = []
            for ticket in self._available(source):
                if ticket.group is None:
                    continue
                if self._pace.expires(ticket.group, step):
                    self._book.move(ticket, State.EXPIRED if self._pace.tail >= 0 else State.FILTERED)
                    self.expired += 1
                elif (priority := self._policy(ticket.group, step=step, uses=0)) is None:
                    self._book.move(ticket, State.FILTERED)
                    self.dropped += 1
                else:
                    ranked.append((-priority, ticket.number, ticket))
            found[source] = [ticket for *_, ticket in sorted(ranked, key=lambda each: each[:2])]
        return found

    def _has_tail(self, source: str) -> bool:
        return 0 < self._pace.tail <= len(self._book.tickets(source, State.EXPIRED))

    def _fill(self) -> None:
        """Start what is wanted; between the look at what runs and the start nothing else can happen."""
        if self._paused or self.failure is not None:
            return
        for source in self._streams.names:
            batch = self._batches[min(self._batches)].get(source, 0) if self._batches else 0
            tail = source in self._tails
            wanted = self._book.wanted(source, batch, 0.0 if tail else self._pace.oversample)
            first = () if self._pace.tail and not tail else (State.EXPIRED,)
            again = self._book.tickets(source, *first, State.ABORTED, State.INIT)[:wanted] if wanted else []
            for i in range(wanted):
                fresh = i >= len(again)
                self._start(self._book.issue(source, *self._streams.draw(source)) if fresh else again[i])

    def _start(self, ticket: Ticket) -> None:
        self._book.move(ticket, State.RUNNING)
        running = asyncio.get_running_loop().create_task(self._run(ticket))
        self._running.add(running)
        # Not in the task itself: one that is cancelled before its first turn never runs.
        running.add_done_callback(functools.partial(self._ended, ticket))

    async def _run(self, ticket: Ticket) -> tuple[State, Group]:
        group = await self._make(ticket)
        if self._paused and any(rollout.status == "aborted" for rollout in group.rollouts):
            return State.ABORTED, group
        return (State.COMPLETED if self._wanted(group) else State.FILTERED), group

    def _ended(self, ticket: Ticket, running: asyncio.Task[tuple[State, Group]]) -> None:
        self._running.discard(running)
        error = None if running.cancelled() else running.exception()
        to, group = (State.ABORTED, ticket.group) if running.cancelled() or error else running.result()
        if isinstance(error, UnfinishedError):
            group, error = error.group, None
        self._book.move(ticket, to, group)
        self.failure = self.failure or error
        if to is State.FILTERED:  # another takes its place at once, also while the trainer works
            try:
                self._fill()
            except Exception as failed:  # noqa: BLE001 - whoever takes gets it
                self.failure = self.failure or failed
        self._changed.set()
