"""What becomes of every task that is issued: states, the legal ways between them, and counts that add up.

Plain bookkeeping, without time, engines or events, so that it can be checked as a state machine.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from enum import StrEnum
from typing import Any

import attrs
import numpy as np

from rlsdk.errors import RunError
from rlsdk.types import Group, Task


class State(StrEnum):
    """Of a task that was issued, and of the group that it becomes."""

    INIT = "init"
    RUNNING = "running"
    COMPLETED = "completed"
    ABORTED = "aborted"
    EXPIRED = "expired"
    FILTERED = "filtered"
    FAILED = "failed"
    TRAINED = "trained"


LEGAL: Mapping[State, frozenset[State]] = {
    State.INIT: frozenset({State.RUNNING}),
    State.RUNNING: frozenset({State.COMPLETED, State.ABORTED, State.FILTERED, State.FAILED}),
    State.COMPLETED: frozenset({State.TRAINED, State.EXPIRED, State.FILTERED, State.FAILED}),
    State.ABORTED: frozenset({State.RUNNING, State.EXPIRED}),
    State.EXPIRED: frozenset({State.RUNNING}),
    State.FILTERED: frozenset(),
    State.FAILED: frozenset(),
    State.TRAINED: frozenset(),
}
"""State -> those that may follow. From what ends a task nothing follows."""
ENDS = frozenset(state for state, after in LEGAL.items() if not after)
WASTED = frozenset({State.EXPIRED, State.FILTERED, State.FAILED})
"""What was sampled for a task is never trained on once it is in one of these."""


def sampled_tokens(group: Group | None) -> int:
    """Tokens that the policy sampled for a group."""
    return sum(int(np.count_nonzero(rollout.loss_mask)) for rollout in group.rollouts) if group is not None else 0


@attrs.define(eq=False)
class Ticket:
    """One task on its way.

    Attributes:
        number: In the order of issue.
        source: Name of the source of the task.
        task: The task.
        position: In the source's stream: what a checkpoint keeps of a task that is on its way.
        state: Where it is; changed by `Lifecycle.move` alone.
        group: What it became, from `completed` on; of an aborted one that runs again, what there was of it. Let go of
            where nobody needs it any more.
        attempts: How often it was started.
        taken: The trainer has it; what is left is to say what became of it.
    """

    number: int
    source: str
    task: Task
    position: int = 0
    state: State = State.INIT
    group: Group | None = None
    attempts: int = 0
    taken: bool = False


@attrs.frozen
class Counts:
    """Of one source, absolute: since the run began.

    Attributes:
        target: Groups that the trainer has asked for.
        consumed: Groups that the trainer took, whatever became of them.
        available: Groups that wait for the trainer.
        scheduled: Tasks that run.
        waiting: Tasks that are issued, were aborted or have expired; they are started before fresh ones.
        trained: Groups that were trained.
        filtered: Groups that a filter left out.
        failed: Tasks that gave no group that could be trained.
        expired: How often a group had to be made again, since it was too old.
    """

    target: int = 0
    consumed: int = 0
    available: int = 0
    scheduled: int = 0
    waiting: int = 0
    trained: int = 0
    filtered: int = 0
    failed: int = 0
    expired: int = 0

    @property
    def gap(self) -> int:
        """Groups that are asked for and neither taken nor there."""
        return max(0, self.target - self.consumed - self.available)


class Lifecycle:
    """All tickets that have not ended, and the counts of those that have.

    Attributes:
        wasted: Tokens that were sampled for groups that expired, were filtered or failed, since it was made.
    """

    def __init__(self, sources: Sequence[str]) -> None:
        """Make one.

        Args:
            sources: Names, which differ.
        """
        # Tickets that have not ended, by source, state and number: what is asked for at every turn costs no search.
        self._live: dict[str, dict[State, dict[int, Ticket]]] = {
            name: {state: {} for state in State if state not in ENDS} for name in sources
        }
        self._in_hand: dict[str, int] = dict.fromkeys(sources, 0)
        self._next = 0
        self._target = dict.fromkeys(sources, 0)
        self._consumed = dict.fromkeys(sources, 0)
        self._ended: dict[str, Counter[State]] = {name: Counter() for name in sources}
        self._expired: Counter[str] = Counter()
        self.wasted = 0

    def issue(self, source: str, task: Task, position: int = 0, number: int | None = None) -> Ticket:
        """A new ticket.

        Args:
            source: Name of its source.
            task: The task.
            position: In the source's stream.
            number: That it had in the checkpoint that the run goes on from; left out, the next one.

        Raises:
            KeyError: There is no such source.
        """
        there = self._live[source][State.INIT]
        ticket = Ticket(self._next if number is None else number, source, task, position)
        self._next = max(self._next, ticket.number + 1)
        there[ticket.number] = ticket
        return ticket

    def move(self, ticket: Ticket, to: State, group: Group | None = None) -> None:
        """Change a ticket's state.

        Args:
            ticket: Which one.
            to: The new state.
            group: What it became, with `completed` and with `filtered`; of an aborted one, what there is of it, which
                stays while it runs again.

        Raises:
            RunError: The way is not legal: a task would end twice, or be lost.
        """
        legal = LEGAL[ticket.state] - ({State.EXPIRED} if ticket.taken else set())
        live = self._live[ticket.source]
        if to not in legal or live[ticket.state].get(ticket.number) is not ticket:
            raise RunError(
                f"task {ticket.task.id!r} of {ticket.source}, ticket {ticket.number}: {ticket.state} cannot become {to}"
            )
        del live[ticket.state][ticket.number]
        if to in WASTED:
            self.wasted += sampled_tokens(ticket.group or group)
        self._expired[ticket.source] += to is State.EXPIRED
        ticket.state = to
        ticket.attempts += to is State.RUNNING
        if to is not State.RUNNING:
            ticket.group = None if to in ENDS else group
        if to in ENDS:
            self._ended[ticket.source][to] += 1
            self._in_hand[ticket.source] -= ticket.taken
        else:
            live[to][ticket.number] = ticket

    def take(self, ticket: Ticket) -> Group:
        """Hand a group to the trainer, once.

        Raises:
            RunError: There is no group, or the trainer has it.
        """
        if ticket.state is not State.COMPLETED or ticket.taken or ticket.group is None:
            raise RunError(f"ticket {ticket.number} of {ticket.source} is {ticket.state}: there is nothing to take")
        ticket.taken = True
        self._consumed[ticket.source] += 1
        self._in_hand[ticket.source] += 1
        return ticket.group

    def ask(self, source: str, target: int) -> None:
        """The trainer wants so many groups of a source in all; a lower figure than before changes nothing."""
        self._target[source] = max(self._target[source], target)

    def counts(self, source: str) -> Counts:
        """Where a source stands.

        Raises:
            KeyError: There is no such source.
        """
        live, ended = self._live[source], self._ended[source]
        return Counts(
            target=self._target[source],
            consumed=self._consumed[source],
            available=len(live[State.COMPLETED]) - self._in_hand[source],
            scheduled=len(live[State.RUNNING]),
            waiting=len(live[State.INIT]) + len(live[State.ABORTED]) + len(live[State.EXPIRED]),
            trained=ended[State.TRAINED],
            filtered=ended[State.FILTERED],
            failed=ended[State.FAILED],
            expired=self._expired[source],
        )

    def wanted(self, source: str, batch: int, oversample: float) -> int:
        """How many tasks should be started now.

        What is scheduled stays within the target and a reserve. The reserve is a share of the batch, not of the gap: as
        the gap closes, it does not shrink.

        Args:
            source: Which one.
            batch: Groups of it in a batch.
            oversample: Reserve, as a share of the batch; 0 for none.
        """
        counts = self.counts(source)
        reserve = math.ceil(batch * oversample) if counts.gap else 0
        return max(0, counts.gap + reserve - counts.scheduled)

    def tickets(self, source: str, *states: State) -> list[Ticket]:
        """The live tickets of a source in these states, in the order of the states and, within one, of issue."""
        live = self._live[source]
        return [live[state][number] for state in states if state in live for number in sorted(live[state])]

    @property
    def issued(self) -> int:
        """Tickets in all."""
        live = sum(len(tickets) for states in self._live.values() for tickets in states.values())
        return live + sum(count.total() for count in self._ended.values())

    def state(self) -> dict[str, Any]:
        """Targets, what has ended, and the next number, as plain JSON; what is on its way is issued again."""
        sources = {
            name: {
                "target": self._target[name],
                "consumed": self._consumed[name],
                **{s.value: self._ended[name][s] for s in sorted(ENDS)},
            }
            for name in self._target
        }
        return {"next": self._next, "sources": sources}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from `state()`; a source that was not there then begins at zero."""
        self._next = state["next"]
        for name, then in state["sources"].items():
            if name in self._target:
                self._target[name], self._consumed[name] = then["target"], then["consumed"]
                self._ended[name] = Counter({s: then[s.value] for s in ENDS})
