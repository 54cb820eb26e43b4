"""The Ray actor of a rollout worker, which samples and scores part of a run's groups."""

from __future__ import annotations

import asyncio
import logging
import sys
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import ExitStack
from contextvars import ContextVar
from typing import Any

import attrs

from rlsdk.cluster.actors import RunActor, reason
from rlsdk.cluster.portable import PortablePlan, Surroundings, portable
from rlsdk.isolation.process import settle
from rlsdk.isolation.spans import RECORDER
from rlsdk.isolation.vitals import Identity
from rlsdk.rollout.codec import ChatTokenizer
from rlsdk.rollout.generator import first_error
from rlsdk.rollout.production import UnfinishedError
from rlsdk.types import Rollout, Score
from rlsdk.workers.local import LocalMaker, RolloutShare, local_maker
from rlsdk.workers.messages import (
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
    Make,
    Notice,
    Release,
    Resume,
    Spent,
    WorkerReport,
)
from rlsdk.workers.orders import MadeGroup

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
        settle()
        self._proceed()

    async def identity(self) -> Identity:  # type: ignore[override]
        """Identify this process once user code yields to its loop; if it never does, the watchdog notices."""
        if self._maker is not None:
            await self._maker.user_loop.answer()
        return super().identity()

    async def take(self, serial: int, commands: Sequence[Command]) -> None:
        """Execute the commands of a message.

        Args:
            serial: Number of the message, from 0. Ray may deliver messages out of order.
            commands: Commands, in order.
        """
        self._early[serial] = commands
        self._proceed()

    async def answers(self) -> AsyncIterator[WorkerReport]:
        """Yield the results of commands, forever (`num_returns="streaming"`)."""
        while True:
            await self._some.wait()
            self._some.clear()
            answers, self._answers = self._answers, []
            notices, self._notices = self._notices, []
            if self._maker is not None:
                yield WorkerReport(self._maker.counters(), answers, notices)
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
    """Send warnings and spans to the driver from any thread; implements `isolation.spans.SpanRecorder`."""

    def __init__(self, send: Callable[[Notice], None]) -> None:
        super().__init__(logging.WARNING)
        self._send = send

    def emit(self, record: logging.LogRecord) -> None:
        self._send(Logged(record.name, record.levelno, record.getMessage()))

    def add(self, actor: str, name: str, begin: float, end: float, counts: dict[str, float]) -> None:
        self._send(Spent(actor, name, begin, end, counts))
