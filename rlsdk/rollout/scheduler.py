"""Rollout scheduler: start tasks as soon as they are due, and give complete groups to the trainer in batches.

One scheduler serves all modes. If no batches are requested ahead, it is synchronous: a step's tasks start together, and
the next ones once the step has trained on their groups. Otherwise tasks keep running while the trainer works.
"""

from __future__ import annotations

import asyncio
import copy
import functools
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from rlsdk.components import calling, see_definition
from rlsdk.contracts.rollouts import TaskRecord, TaskStatus
from rlsdk.engines.pausable import AGAIN
from rlsdk.errors import RunError
from rlsdk.rollout.buffer import BufferPolicy, DropLimit, first_come, priority_of
from rlsdk.rollout.mixture import TaskStreams
from rlsdk.rollout.staleness import StalenessPolicy
from rlsdk.rollout.task_ledger import TaskLedger
from rlsdk.types import Group


class UnfinishedError(Exception):
    """Raised when a task was stopped. `group` is the part sampled so far, from which the task is restarted."""

    def __init__(self, group: Group) -> None:
        super().__init__(f"task {group.task.id!r} was aborted from outside")
        self.group = group


class Pausable(Protocol):
    """Client whose sampling can be interrupted, such as `PausableClient`."""

    def interrupt(self) -> None:
        """Stop sampling until `release`, including new requests; running tasks get partial answers."""
        ...

    def release(self) -> None:
        """Resume sampling."""
        ...


class RolloutScheduler:
    """Start tasks, keep their groups, and give batches to the trainer.

    Attributes:
        expired: Number of groups that became too stale.
        failure: First exception that `make` raised.
    """

    def __init__(
        self,
        ledger: TaskLedger,
        limits: StalenessPolicy,
        *,
        batch: int,
        streams: TaskStreams,
        make: Callable[[TaskRecord], Awaitable[Group]],
        wanted: Callable[[Group], bool] = lambda group: True,
        policy: BufferPolicy = first_come,
        most_dropped: int | None = None,
        stop: Callable[..., bool] | None = None,
        pausable: Pausable | None = None,
    ) -> None:
        """Create a scheduler; no task starts before the first `take`.

        Args:
            ledger: Task ledger.
            limits: Limits on running ahead.
            streams: Task sources, which also divide each batch among themselves.
            batch: Number of groups in a batch.
            make: Returns the scored group of a task, continuing the record's partial group if it has one. Any
                exception but `UnfinishedError` ends the run.
            wanted: Returns True if a group may be trained on; otherwise another task replaces it.
            policy: Returns the priority of an available group. A group that it drops counts as filtered and is
                replaced by another task.
            most_dropped: Number of consecutive groups dropped by the policy after which the run ends, since no batch
                can be filled; None for no limit.
            stop: Returns True if `available` groups of `target` are enough for a batch; None requires all.
            pausable: Interrupts the sampling of running tasks; without it, a pause cancels them immediately.
        """
        self._ledger, self._limits, self._policy = ledger, limits, policy
        remedy = "make it return a priority for some, or choose another policy"
        self._drop_limit = DropLimit(most_dropped, "buffer: its policy dropped", remedy)
        self._streams, self._batch, self._make, self._wanted = streams, batch, make, wanted
        self._stop, self._pausable = stop, pausable
        self._batches: dict[int, Mapping[str, int]] = {}
        self._taken: dict[int, list[TaskRecord]] = {}
        self._requested = 0
        self._deficit: dict[str, int] = dict.fromkeys(streams.names, 0)
        self._running: set[asyncio.Task[tuple[TaskStatus, Group]]] = set()
        self._changed = asyncio.Event()
        self._paused = False
        self._tails: frozenset[str] = frozenset()
        self.failure: BaseException | None = None
        self.expired = 0
        self.dropped = 0

    async def take(self, step: int) -> list[TaskRecord]:
        """Return the batch of a step once it is complete, or large enough, in the order of the policy.

        A failed step may be retried: it gets the same batch until the batch is settled.

        Returns:
            Records with their groups, at least one.

        Raises:
            BaseException: The first exception that `make` raised, with its traceback; no group is taken then.
            RunError: The policy dropped `most_dropped` groups in a row, or the batch of this step is settled.
        """
        self._paused = False
        if self._pausable is not None:
            self._pausable.release()
        if step in self._taken:
            self._fill()
            return self._taken[step]
        self._streams.learn()
        batch = self._request(step)
        self._rank(step)
        expired = {s: len(self._ledger.records(s, TaskStatus.EXPIRED)) for s in self._streams.names}
        # Until the next step, these sources only run expired and aborted tasks, without a reserve.
        self._tails = frozenset(s for s, count in expired.items() if 0 < self._limits.tail <= count)
        while True:
            if self.failure is not None:
                raise self.failure
            self._changed.clear()
            self._fill()
            if self._enough(batch):
                ranks = self._rank(step)  # older groups may have become too stale
                if self._enough(batch):
                    break
            else:
                await self._changed.wait()
        taken = [record for source, count in batch.items() for record in ranks[source][:count]]
        for record in taken:
            record.group = self._limits.trimmed(self._ledger.take(record), step)
        for source, count in batch.items():  # groups that were not ready in time go to later batches
            self._deficit[source] += count - sum(record.source == source for record in taken)
        del self._batches[step]
        self._taken[step] = taken
        self._fill()
        return taken

    def settle(self, records: Sequence[TaskRecord], statuses: Sequence[TaskStatus]) -> None:
        """Set the final status of taken records: trained, filtered or failed."""
        for record, status in zip(records, statuses, strict=True):
            self._ledger.move(record, status)
        numbers = {record.number for record in records}
        self._taken = {s: taken for s, taken in self._taken.items() if numbers.isdisjoint(t.number for t in taken)}

    def state(self) -> dict[str, Any]:
        """Return requests and unfinished tasks as plain JSON; the groups of records under `kept` are in the store.

        The batch of a failed step, which may be retried, is requested as if it had not been taken.
        """
        failed = {step: Counter(record.source for record in taken) for step, taken in self._taken.items()}
        return {
            "asked": self._requested,
            "owed": dict(self._deficit),
            "batches": {str(step): dict(parts) for step, parts in {**self._batches, **failed}.items()},
            "on_the_way": {
                source: sorted(t.position for t in self._ledger.records(source, *TaskStatus))
                for source in self._streams.names
            },
            "kept": [[t.source, t.position, t.number] for t in self.unsettled()],
            "ended": self._ledger.state(),
        }

    @staticmethod
    def settled(
        state: Mapping[str, Any], records: Sequence[TaskRecord], statuses: Sequence[TaskStatus]
    ) -> dict[str, Any]:
        """Return the `state()` right after `take` as it is after `settle`, for a scheduler whose process has ended."""
        after = copy.deepcopy(dict(state))
        for record, status in zip(records, statuses, strict=True):
            after["on_the_way"][record.source].remove(record.position)
            after["ended"]["sources"][record.source][status.value] += 1
            after["ended"]["sources"][record.source]["consumed"] += 1
        numbers = {record.number for record in records}
        after["kept"] = [each for each in after["kept"] if each[2] not in numbers]
        del after["batches"][min(after["batches"], key=int)]  # later ones are of later steps
        return after

    def unsettled(self) -> list[TaskRecord]:
        """Return the records with complete groups: those ready for the trainer, and those of a step not yet done."""
        return [t for source in self._streams.names for t in self._ledger.records(source, TaskStatus.COMPLETED)]

    def restore(self, state: Mapping[str, Any], groups: Mapping[int, Group]) -> int:
        """Restore from `state()`; return the number of tasks that are sampled again, having no stored group."""
        self._requested = state["asked"]
        self._deficit |= {name: count for name, count in state.get("owed", {}).items() if name in self._deficit}
        self._ledger.restore(state["ended"])
        self._batches = {int(step): self._among_present(parts) for step, parts in state["batches"].items()}
        kept = {n: (s, p) for s, p, n in state.get("kept", ()) if s in self._streams.names and n in groups}
        for number, (source, position) in sorted(kept.items()):
            record = self._ledger.issue(source, self._streams[source].at(position), position, number)
            self._ledger.move(record, TaskStatus.RUNNING)
            self._ledger.move(record, TaskStatus.COMPLETED, groups[number])
        restored = set(kept.values())
        unfinished = [(s, p) for s, found in state["on_the_way"].items() for p in found if s in self._streams.names]
        again = [place for place in unfinished if place not in restored]
        for source, position, number in state.get("kept", ()):
            if source in self._streams.names and number not in groups:
                self._streams[source].repeat(position)
        for source, position in again:
            self._ledger.issue(source, self._streams[source].at(position), position)
        return len(again)

    def _among_present(self, parts: Mapping[str, int]) -> Mapping[str, int]:
        """Return the parts of a requested batch, with removed sources replaced by others."""
        found = {source: count for source, count in parts.items() if source in self._streams.names}
        missing = sum(parts.values()) - sum(found.values())
        for source, count in (self._streams.divide(missing) if missing else {}).items():
            found[source] = found.get(source, 0) + count
            self._ledger.ask(source, self._ledger.counts(source).target + count)
        return found

    async def pause(self, seconds: float = 0.0, *, again: float = AGAIN) -> int:
        """Stop starting tasks, and end running ones, whose number is returned; the next `take` continues them.

        Sampling is interrupted, and once more every `again` seconds, so that tasks finish with partial answers. Those
        that have not finished within `seconds` are cancelled and start over.
        """
        self._paused = True
        running = list(self._running)
        loop = asyncio.get_running_loop()
        until = loop.time() + seconds
        while self._pausable is not None and self._running and (left := until - loop.time()) > 0:
            self._pausable.interrupt()
            await asyncio.wait(self._running, timeout=min(again, left))
        for task in self._running:
            task.cancel()
        if self._running:
            await asyncio.wait(self._running)
        if self._pausable is not None:  # all tasks have ended; an evaluation may use the same client
            self._pausable.release()
        return len(running)

    def _request(self, step: int) -> Mapping[str, int]:
        """Request all batches for which groups started now are fresh enough; return the parts of `step`'s batch."""
        # Tasks sample with the weights of the last sync, so the step is rounded down to it.
        while self._requested <= step - step % self._limits.interval + self._limits.ahead:
            parts = self._batches[self._requested] = dict(self._streams.divide(self._batch))
            for source, count in parts.items():
                # Groups missing from an earlier batch were already requested and are not requested twice.
                deficit = min(self._deficit[source], count)
                self._deficit[source] -= deficit
                self._ledger.ask(source, self._ledger.counts(source).target + count - deficit)
            self._requested += 1
        if step not in self._batches:
            raise RunError(f"the batch of step {step} has already been taken and settled")
        return self._batches[step]

    def _enough(self, batch: Mapping[str, int]) -> bool:
        ready = {source: min(count, self._ledger.counts(source).available) for source, count in batch.items()}
        available, target = sum(ready.values()), sum(batch.values())
        if available == target or self._stop is None:
            return available == target
        if not available:
            return False
        with calling(self._stop):
            enough: object = self._stop(available=available, target=target)
        if not isinstance(enough, bool | np.bool_):
            raise RunError(f"rollout.stop returned {enough!r}; expected True or False{see_definition(self._stop)}")
        return bool(enough)

    def _rank(self, step: int) -> dict[str, list[TaskRecord]]:
        """Drop expired groups and those that the policy rejects; return the rest of each source by priority.

        The policy is evaluated at each step, since priorities may change. The cost is proportional to the number of
        available groups, which the trainer's requests limit to a few batches.
        """
        found: dict[str, list[TaskRecord]] = {}
        for source in self._streams.names:
            ranked = []
            for record in self._ledger.records(source, TaskStatus.COMPLETED):
                if record.taken or record.group is None:
                    continue
                if self._limits.expires(record.group, step):
                    self._ledger.move(record, TaskStatus.EXPIRED)
                    if self._limits.tail < 0:
                        self._ledger.move(record, TaskStatus.FILTERED)
                    else:
                        self._streams[record.source].repeat(record.position)
                    self.expired += 1
                elif (priority := priority_of(self._policy, record.group, step=step, uses=0)) is None:
                    self._ledger.move(record, TaskStatus.FILTERED)
                    self.dropped += 1
                    self._drop_limit.note(kept=False)
                else:
                    self._drop_limit.note(kept=True)
                    ranked.append((-priority, record.number, record))
            found[source] = [record for *_, record in sorted(ranked, key=lambda each: each[:2])]
        return found

    def _fill(self) -> None:
        """Start the tasks that are due, without yielding to the event loop, so that none is started twice."""
        if self._paused or self.failure is not None:
            return
        for source in self._streams.names:
            batch = self._batches[min(self._batches)].get(source, 0) if self._batches else 0
            tail = source in self._tails
            wanted = self._ledger.wanted(source, batch, 0.0 if tail else self._limits.oversample)
            # Expired tasks go first, since they have waited longest; with `tail_batch`, only when they fill one.
            first = () if self._limits.tail and not tail else (TaskStatus.EXPIRED,)
            again = self._ledger.records(source, *first, TaskStatus.ABORTED, TaskStatus.INIT)[:wanted] if wanted else []
            for i in range(wanted):
                fresh = i >= len(again)
                record = self._ledger.issue(source, *self._streams[source].draw()) if fresh else again[i]
                self._ledger.move(record, TaskStatus.RUNNING)
                running = asyncio.get_running_loop().create_task(self._run(record))
                self._running.add(running)
                # Not inside the task, since a task cancelled before its first turn never runs.
                running.add_done_callback(functools.partial(self._ended, record))

    async def _run(self, record: TaskRecord) -> tuple[TaskStatus, Group]:
        group = await self._make(record)
        if self._paused and any(rollout.status == "aborted" for rollout in group.rollouts):
            return TaskStatus.ABORTED, group
        return (TaskStatus.COMPLETED if self._wanted(group) else TaskStatus.FILTERED), group

    def _ended(self, record: TaskRecord, running: asyncio.Task[tuple[TaskStatus, Group]]) -> None:
        self._running.discard(running)
        error = None if running.cancelled() else running.exception()
        # A cancelled or failed task keeps the part that an earlier attempt sampled.
        to, group = (TaskStatus.ABORTED, record.group) if running.cancelled() or error else running.result()
        if isinstance(error, UnfinishedError):
            group, error = error.group, None
        self._ledger.move(record, to, group)
        if group is not None and to in (TaskStatus.COMPLETED, TaskStatus.FILTERED):
            self._streams[record.source].note(record.position, group)
        self.failure = self.failure or error
        if to is TaskStatus.FILTERED:  # another task replaces it immediately, even during a training step
            try:
                self._fill()
            except Exception as failed:  # noqa: BLE001 - raised by the next `take`
                self.failure = self.failure or failed
        self._changed.set()
