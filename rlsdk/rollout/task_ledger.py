"""Task ledger: statuses, legal transitions between them, and counts that add up.

It is pure bookkeeping without time, engines or events, so that it can be tested as a state machine.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from rlsdk.contracts.rollouts import TaskCounts, TaskRecord, TaskStatus
from rlsdk.errors import RunError
from rlsdk.types import Group, Task

LEGAL: Mapping[TaskStatus, frozenset[TaskStatus]] = {
    TaskStatus.INIT: frozenset({TaskStatus.RUNNING}),
    TaskStatus.RUNNING: frozenset({TaskStatus.COMPLETED, TaskStatus.ABORTED, TaskStatus.FILTERED, TaskStatus.FAILED}),
    TaskStatus.COMPLETED: frozenset({TaskStatus.TRAINED, TaskStatus.EXPIRED, TaskStatus.FILTERED, TaskStatus.FAILED}),
    TaskStatus.ABORTED: frozenset({TaskStatus.RUNNING, TaskStatus.EXPIRED}),
    TaskStatus.EXPIRED: frozenset({TaskStatus.RUNNING, TaskStatus.FILTERED}),
    TaskStatus.FILTERED: frozenset(),
    TaskStatus.FAILED: frozenset(),
    TaskStatus.TRAINED: frozenset(),
}
"""Status -> statuses that may follow; final statuses have none."""
ENDS = frozenset(state for state, after in LEGAL.items() if not after)
WASTED = frozenset({TaskStatus.EXPIRED, TaskStatus.FILTERED, TaskStatus.FAILED})
"""Statuses of tasks whose sampled tokens are never trained on."""


def sampled_tokens(group: Group | None) -> int:
    """Return the number of tokens that the policy sampled for a group."""
    return sum(int(np.count_nonzero(rollout.loss_mask)) for rollout in group.rollouts) if group is not None else 0


class TaskLedger:
    """All unfinished task records, and the counts of finished ones.

    Attributes:
        wasted: Number of tokens sampled for groups that expired, were filtered or failed, since the ledger was created.
    """

    def __init__(self, sources: Sequence[str]) -> None:
        """Create an empty ledger."""
        # Unfinished records by source, status and number, so that frequent queries need no search.
        self._live: dict[str, dict[TaskStatus, dict[int, TaskRecord]]] = {
            name: {state: {} for state in TaskStatus if state not in ENDS} for name in sources
        }
        self._in_hand: dict[str, int] = dict.fromkeys(sources, 0)
        self._next = 0
        self._target = dict.fromkeys(sources, 0)
        self._consumed = dict.fromkeys(sources, 0)
        self._ended: dict[str, Counter[TaskStatus]] = {name: Counter() for name in sources}
        self._expired: Counter[str] = Counter()
        self.wasted = 0

    def issue(self, source: str, task: Task, position: int = 0, number: int | None = None) -> TaskRecord:
        """Add a record for a new task; `number` is the one that it has in the checkpoint being resumed.

        Raises:
            KeyError: There is no such source.
        """
        fresh = self._live[source][TaskStatus.INIT]
        record = TaskRecord(self._next if number is None else number, source, task, position)
        self._next = max(self._next, record.number + 1)
        fresh[record.number] = record
        return record

    def move(self, record: TaskRecord, to: TaskStatus, group: Group | None = None) -> None:
        """Change the status of a record.

        Args:
            record: Record to change.
            to: New status.
            group: Sampled group for `completed` and `filtered`; for an aborted task, the part sampled so far, which
                is kept while it runs again.

        Raises:
            RunError: The transition is illegal: a task would end twice or be lost.
        """
        # A group that the trainer holds cannot expire; this step trains, filters or fails it.
        legal = LEGAL[record.state] - ({TaskStatus.EXPIRED} if record.taken else set())
        live = self._live[record.source]
        if to not in legal or live[record.state].get(record.number) is not record:
            raise RunError(
                f"task {record.task.id!r} of {record.source}, number {record.number}: a task that is {record.state} "
                f"cannot become {to}"
            )
        del live[record.state][record.number]
        if to in WASTED:
            self.wasted += sampled_tokens(record.group if group is None else group)
        self._expired[record.source] += to is TaskStatus.EXPIRED
        record.state = to
        record.attempts += to is TaskStatus.RUNNING
        if to is not TaskStatus.RUNNING:
            record.group = None if to in ENDS else group
        if to in ENDS:
            self._ended[record.source][to] += 1
            self._in_hand[record.source] -= record.taken
        else:
            live[to][record.number] = record

    def take(self, record: TaskRecord) -> Group:
        """Give a group to the trainer, once.

        Raises:
            RunError: There is no group, or the trainer already has it.
        """
        if record.state is not TaskStatus.COMPLETED or record.taken or record.group is None:
            raise RunError(f"task {record.number} of {record.source} is {record.state}: it has no group to take")
        record.taken = True
        self._consumed[record.source] += 1
        self._in_hand[record.source] += 1
        return record.group

    def ask(self, source: str, target: int) -> None:
        """Raise the total number of groups that the trainer requests from a source; a lower number has no effect."""
        self._target[source] = max(self._target[source], target)

    def counts(self, source: str) -> TaskCounts:
        """Return the counts of a source.

        Raises:
            KeyError: There is no such source.
        """
        live, ended = self._live[source], self._ended[source]
        return TaskCounts(
            target=self._target[source],
            consumed=self._consumed[source],
            available=len(live[TaskStatus.COMPLETED]) - self._in_hand[source],
            scheduled=len(live[TaskStatus.RUNNING]),
            waiting=len(live[TaskStatus.INIT]) + len(live[TaskStatus.ABORTED]) + len(live[TaskStatus.EXPIRED]),
            trained=ended[TaskStatus.TRAINED],
            filtered=ended[TaskStatus.FILTERED],
            failed=ended[TaskStatus.FAILED],
            expired=self._expired[source],
        )

    def wanted(self, source: str, batch: int, oversample: float) -> int:
        """Return the number of tasks to start now.

        Running tasks stay within the target plus a reserve. The reserve is a share of the batch, so it does not shrink
        as the deficit closes.
        """
        counts = self.counts(source)
        reserve = math.ceil(batch * oversample) if counts.gap else 0
        return max(0, counts.gap + reserve - counts.scheduled)

    def records(self, source: str, *states: TaskStatus) -> list[TaskRecord]:
        """Return a source's live records with these statuses, ordered by status as given, then by number."""
        live = self._live[source]
        return [live[state][number] for state in states if state in live for number in sorted(live[state])]

    def state(self) -> dict[str, Any]:
        """Return targets, counts and the next number as plain JSON; unfinished tasks are issued again on restore."""
        sources = {
            name: {
                "target": self._target[name],
                "consumed": self._consumed[name] - self._in_hand[name],
                **{s.value: self._ended[name][s] for s in sorted(ENDS)},
                "expired": self._expired[name],
            }
            for name in self._target
        }
        return {"next": self._next, "sources": sources}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restore the ledger from `state()`; new sources start at zero."""
        self._next = state["next"]
        for name, then in state["sources"].items():
            if name in self._target:
                self._target[name], self._consumed[name] = then["target"], then["consumed"]
                self._ended[name] = Counter({s: then[s.value] for s in ENDS})
                self._expired[name] = then.get("expired", 0)
