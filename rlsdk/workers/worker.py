"""The driver's client of one rollout worker; commands of one event-loop turn are sent as one message."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Iterable
from typing import Any

import attrs
import cloudpickle

from rlsdk.cluster.actors import cause_of, died, kill
from rlsdk.scoring.batching import task_fault
from rlsdk.workers.messages import Command, Drain, Hold, Make, Notice, WorkerReport
from rlsdk.workers.orders import MakerCounters


@attrs.frozen(kw_only=True)
class WorkerEvents:
    """Callbacks of a worker, each with the worker as its first argument.

    Attributes:
        answered: Called with the number of a command and its answer.
        noticed: Called with unsolicited notices.
        lost: Called once with the error that ended its process or that its code raised.
    """

    answered: Callable[[RolloutWorker, int, Any], None]
    noticed: Callable[[RolloutWorker, Notice], None]
    lost: Callable[[RolloutWorker, Exception], None]


class RolloutWorker:
    """Client of one worker actor.

    Attributes:
        rank: Number of the worker.
        load: Number of outstanding rollouts.
        counters: Its counters at its last answer.
        actor: Its handle.
        leaving: True if it gets no more groups, since its node is draining.
        gone: True once it has died or was ended.
    """

    def __init__(self, rank: int, actor: Any, events: WorkerEvents) -> None:
        """Create a client; the actor may still be starting.

        Args:
            rank: Number of the worker.
            actor: Its handle.
            events: Callbacks.
        """
        self.rank, self.load, self.leaving, self.gone = rank, 0, False, False
        self.counters = MakerCounters()
        self.actor, self._events = actor, events
        self._serial = itertools.count()
        self._outbox: list[Command] = []
        self._confirmations: dict[int, asyncio.Future[None]] = {}
        self._listening: asyncio.Task[None] | None = None

    def send(self, commands: Iterable[Command]) -> None:
        """Send commands together with others of this event-loop turn; a dead worker ignores them."""
        if self.gone:
            return
        loop = asyncio.get_running_loop()
        if self._listening is None:
            self._listening = loop.create_task(self._listen())
        if not self._outbox:
            loop.call_soon(self._flush)
        self._outbox += commands

    def confirmed(self, command: Hold | Drain) -> asyncio.Future[None]:
        """Send a command, and return a future that completes when the worker has executed it or has gone."""
        confirmation: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        if self.gone:
            confirmation.set_result(None)
        else:
            self._confirmations[command.number] = confirmation
            self.send([command])
        return confirmation

    def end(self) -> None:
        """Kill the actor."""
        self.gone = True
        kill(self.actor)
        for number in list(self._confirmations):
            self._confirm(number)
        if self._listening is not None and not self._listening.get_loop().is_closed():
            self._listening.cancel()

    def _flush(self) -> None:
        commands, self._outbox = self._outbox, []
        if self.gone:
            return
        try:
            self.actor.take.remote(next(self._serial), commands)
        except Exception as error:  # noqa: BLE001 - the commands cannot be pickled, and none was sent
            orders = [command for command in commands if isinstance(command, Make)]
            fault = task_fault((each.order.task for each in orders), cloudpickle.dumps)
            self._events.lost(self, fault or error)

    async def _listen(self) -> None:
        """Receive answers until the worker is gone."""
        try:
            async for reference in self.actor.answers.options(num_returns="streaming").remote():
                self._hear(await reference)
        except Exception as error:  # noqa: BLE001 - whoever waits for this worker gets it
            if not self.gone:
                self._events.lost(self, error if died(error) else cause_of(error))  # type: ignore[arg-type]

    def _hear(self, bundle: WorkerReport) -> None:
        self.counters = bundle.counters
        for notice in bundle.notices:
            self._events.noticed(self, notice)
        for number, answer in bundle.answers:
            if number in self._confirmations:
                self._confirm(number)
            else:
                self._events.answered(self, number, answer)

    def _confirm(self, number: int) -> None:
        confirmation = self._confirmations.pop(number)
        if not confirmation.done() and not confirmation.get_loop().is_closed():
            confirmation.set_result(None)
