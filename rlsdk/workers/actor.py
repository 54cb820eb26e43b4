"""The Ray actor of a rollout worker, which samples and scores part of a run's groups, and the driver's client of it.

Commands of one event-loop turn are sent as one message.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import sys
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Sequence
from contextlib import ExitStack
from contextvars import ContextVar
from typing import Any

import attrs
import cloudpickle

from rlsdk.cluster.actors import IDENTIFY_SECONDS, RunActor, cause_of, died, kill, pickled, reason, streamed
from rlsdk.cluster.portable import PortablePlan, Surroundings, portable
from rlsdk.isolation.process import settle
from rlsdk.isolation.vitals import Identity
from rlsdk.isolation.watching import RECORDER
from rlsdk.rollout.codec import ChatTokenizer
from rlsdk.rollout.generator import first_error
from rlsdk.rollout.scheduler import UnfinishedError
from rlsdk.scoring.batching import task_fault
from rlsdk.types import Rollout, Score
from rlsdk.workers.local import LocalMaker, RolloutShare, local_maker
from rlsdk.workers.orders import (
    Admit,
    Cancel,
    Command,
    Dismiss,
    Drain,
    EngineDied,
    Hold,
    Interrupt,
    Logged,
    Made,
    MadeGroup,
    Make,
    MakerCounters,
    Notice,
    Release,
    Resume,
    Spent,
    WorkerReport,
)

INTERVAL = 0.005
"""Minimum seconds between messages to the driver, so that many short groups share a message."""
_SEEN: ContextVar[list[tuple[Rollout, Score, int]]] = ContextVar("rlsdk_seen")
"""New rollouts of the group that is being made."""


@attrs.frozen
class WorkerSpec:
    """Setup of a rollout worker, from the program that starts it.

    Attributes:
        plan: Plan of the run.
        surroundings: Working folder and environment variables.
        share: Part of the rollouts that it makes.
        observed: True if a plugin observes each rollout.
    """

    plan: PortablePlan
    surroundings: Surroundings
    share: RolloutShare
    observed: bool


class RolloutWorkerActor(RunActor):
    """Make groups. Commands arrive through `take`; their results leave through `answers`."""

    def __init__(self, log_path: str) -> None:
        super().__init__(log_path)
        logging.basicConfig(stream=sys.stderr, level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
        # A line for each request of an agent would fill the log, and holds the secret in its URL.
        logging.getLogger("httpx").setLevel(logging.WARNING)
        self._maker: LocalMaker | None = None
        self._ends = ExitStack()
        self._early: dict[int, Sequence[Command]] = {}
        self._due = 0
        self._making: dict[int, asyncio.Task[None]] = {}
        self._background: set[asyncio.Task[None]] = set()
        self._admitted: dict[int, tuple[Any, int]] = {}
        self._resumed = asyncio.Event()
        self._answers: list[tuple[int, Any]] = []
        self._notices: list[Notice] = []
        self._some = asyncio.Event()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._relay = _Relay(self._send)

    async def start(self, spec: WorkerSpec) -> None:
        """Load plugins and tokenizer, and start scorer and environments; commands wait until then.

        Raises:
            FingerprintError: A plugin differs from the driver's.
            RlsdkError: A part does not start.
        """
        logging.getLogger("rlsdk").addHandler(self._relay)
        self._loop = asyncio.get_running_loop()
        await asyncio.sleep(IDENTIFY_SECONDS)
        try:
            spec.surroundings.take_over()
            plan = spec.plan.plan()
            observer = self._observe if spec.observed else None
            codec = ChatTokenizer.of(plan)
            self._maker = self._ends.enter_context(local_maker(plan, codec, (), observer, spec.share))
        except Exception as error:
            raise portable(error) from error
        if self._maker.client is not None:
            self._maker.client.lost = self._lose_engine
        settle(rollouts=True)
        self._proceed()

    async def identity(self) -> Identity:  # type: ignore[override]
        """Identify this process once user code yields to its loop; if it never does, the watchdog notices."""
        if self._maker is not None:
            await self._maker.user_loop.answer()
        return super().identity()

    async def take(self, serial: int, commands: Sequence[Command]) -> None:
        """Execute the commands of a message; Ray may deliver them in another order than that of `serial`, from 0."""
        self._early[serial] = commands
        self._proceed()

    async def answers(self) -> AsyncIterator[bytes]:
        """Yield the results of commands, each a `WorkerReport`, forever; see `streamed`."""
        while True:
            await self._some.wait()
            self._some.clear()
            answers, self._answers = self._answers, []
            notices, self._notices = self._notices, []
            if self._maker is not None:
                yield pickled(WorkerReport(self._maker.counters(), answers, notices))
            await asyncio.sleep(INTERVAL)

    def _proceed(self) -> None:
        RECORDER.set(self._relay)  # each actor call has its own context
        while self._maker is not None and self._due in self._early:
            commands = self._early.pop(self._due)
            self._due += 1
            for command in commands:
                self._follow(self._maker, command)

    def _follow(self, maker: LocalMaker, command: Command) -> None:
        match command:
            case Make(number):
                self._making[number] = task = asyncio.get_running_loop().create_task(self._make(maker, command))
                task.add_done_callback(lambda _: self._making.pop(number, None))
            case Cancel(number):
                if number in self._making:
                    self._making[number].cancel()
            case Hold(number):
                self._resumed = resumed = asyncio.Event()
                self._run(self._hold(maker, number, resumed))
            case Resume():
                self._resumed.set()
            case _ if maker.client is None or maker.pausable is None:
                raise RuntimeError(f"got {command}, but this run samples nothing")
            case Admit(rank, incarnation, actor):
                self._admitted[rank] = actor, incarnation
                maker.client.admit(rank, actor)
            case Dismiss(rank):
                maker.client.dismiss(rank)
            case Drain(number, rank):
                self._run(self._drain(maker, number, rank))
            case Interrupt():
                maker.pausable.interrupt()
            case Release():
                maker.pausable.release()

    def _run(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._background.add(task)
        task.add_done_callback(self._background.discard)

    async def _make(self, maker: LocalMaker, command: Make) -> None:
        seen: list[tuple[Rollout, Score, int]] = []
        _SEEN.set(seen)
        answer: Made | BaseException
        try:
            answer = Made(await maker.make(command.order), seen=tuple(seen))
        except UnfinishedError as error:
            answer = Made(MadeGroup(error.group), unfinished=True, seen=tuple(seen))
        except Exception as error:  # noqa: BLE001 - raised where the group is awaited
            answer = portable(first_error(error))
        self._say(command.number, answer)

    async def _hold(self, maker: LocalMaker, number: int, resumed: asyncio.Event) -> None:
        async with maker.held():
            self._say(number, None)
            await resumed.wait()

    async def _drain(self, maker: LocalMaker, number: int, rank: int) -> None:
        if maker.client is not None:
            await maker.client.drain(rank)
        self._say(number, None)

    def _say(self, number: int, answer: Any) -> None:
        self._answers.append((number, answer))
        self._some.set()

    def _notify(self, notice: Notice) -> None:
        self._notices.append(notice)
        self._some.set()

    def _send(self, notice: Notice) -> None:
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._notify, notice)

    def _observe(self, rollout: Rollout, score: Score, step: int) -> None:
        _SEEN.get().append((rollout, score, step))

    def _lose_engine(self, rank: int, actor: Any, error: Exception) -> None:
        admitted, incarnation = self._admitted.get(rank, (None, 0))
        if admitted is actor:
            self._notify(EngineDied(rank, incarnation, reason(error)))


class _Relay(logging.Handler):
    """Send warnings and spans to the driver from any thread; implements `isolation.watching.SpanRecorder`."""

    def __init__(self, send: Callable[[Notice], None]) -> None:
        super().__init__(logging.WARNING)
        self._send = send

    def emit(self, record: logging.LogRecord) -> None:
        self._send(Logged(record.name, record.levelno, record.getMessage()))

    def add(self, actor: str, name: str, begin: float, end: float, counts: dict[str, float]) -> None:
        self._send(Spent(actor, name, end - begin, counts))


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

    def __init__(
        self,
        rank: int,
        actor: Any,
        *,
        answered: Callable[[RolloutWorker, int, Any], None],
        noticed: Callable[[RolloutWorker, Notice], None],
        lost: Callable[[RolloutWorker, Exception], None],
    ) -> None:
        """Create a client; the actor may still be starting. `lost` is called once, with what ended or failed it."""
        self.rank, self.load, self.leaving, self.gone = rank, 0, False, False
        self.counters = MakerCounters()
        self.actor, self._answered, self._noticed, self._lost = actor, answered, noticed, lost
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
            self._lost(self, fault or error)

    async def _listen(self) -> None:
        """Receive answers until the worker is gone."""
        try:
            async for report in streamed(self.actor.answers):
                self._hear(report)
        except Exception as error:  # noqa: BLE001 - whoever waits for this worker gets it
            if not self.gone:
                self._lost(self, error if died(error) else cause_of(error))  # type: ignore[arg-type]

    def _hear(self, report: WorkerReport) -> None:
        self.counters = report.counters
        for notice in report.notices:
            self._noticed(self, notice)
        for number, answer in report.answers:
            if number in self._confirmations:
                self._confirm(number)
            else:
                self._answered(self, number, answer)

    def _confirm(self, number: int) -> None:
        confirmation = self._confirmations.pop(number)
        if not confirmation.done() and not confirmation.get_loop().is_closed():
            confirmation.set_result(None)
