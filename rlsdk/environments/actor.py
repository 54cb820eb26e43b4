"""A Ray actor with environments, its messages with the driver, and the driver's client of it.

Calls made in one iteration of the driver's event loop are sent as one message, as are the answers of calls that end
within a few milliseconds.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import attrs

from rlsdk.cluster.actors import RunActor, described, kill, pickled, spawn, streamed
from rlsdk.components import Isolation
from rlsdk.environments.host import EnvHost, EnvSpec
from rlsdk.errors import EnvironmentFault, RlsdkError, WorldLostError
from rlsdk.isolation.process import settle
from rlsdk.isolation.watching import Busy
from rlsdk.plugins import ComponentRef

log = logging.getLogger(__name__)
INTERVAL = 0.005
"""Maximum seconds that an answer waits for those of the other running calls, so that they share a message, and the
rollouts that continue share a request to the engine."""
CLOSE_DELAY = 0.02
"""Seconds within which a closed environment is closed in its worker: nobody waits for it, so it joins other calls."""
FAILURES: dict[str, type[Exception]] = {
    each.__name__: each for each in (TimeoutError, RuntimeError, TypeError, WorldLostError)
}
"""Exceptions that may end a call, by name; exceptions of foreign code may not be picklable."""
START = 120.0
"""Time limit in seconds for a worker to start; importing rlsdk and environments is slow on a busy machine."""


@attrs.frozen
class Reset:
    """Create an environment of a registered kind, and start its episode."""

    number: int
    kind: int
    options: Mapping[str, Any]
    seed: int
    seconds: float


@attrs.frozen
class Act:
    """Pass a text to an environment as its action."""

    number: int
    text: str
    seconds: float


@attrs.frozen
class Close:
    """Close an environment; there is no answer."""

    number: int


@attrs.frozen
class Register:
    """Register a kind of environment under a number, for use in `Reset`."""

    kind: int
    reference: ComponentRef
    isolation: Isolation


Call = Reset | Act | Close | Register


@attrs.frozen
class Failed:
    """A failed call: its kind, one of `FAILURES`, and the number of calls that now hang in this worker."""

    kind: str
    text: str
    stuck: int


Answer = tuple[int, Any]
"""Number of an environment, and an `Observation`, a `Step`, a `Failed`, or an RlsdkError that ends the run."""


class EnvWorkerActor(RunActor):
    """Hosts the environments of many rollouts in one process."""

    def __init__(self, threads: int, log_path: str) -> None:
        super().__init__(log_path)
        logging.basicConfig(stream=sys.stderr, level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
        self._host = EnvHost(threads)
        self._kinds: dict[int, EnvSpec] = {}
        self._running: set[asyncio.Task[None]] = set()
        self._ready: list[Answer] = []
        self._early: dict[int, Sequence[Call]] = {}
        self._due = 0
        self._some, self._idle = asyncio.Event(), asyncio.Event()
        settle()

    async def about(self) -> int:
        """Return the id of this process; any answer shows that it is alive."""
        return os.getpid()

    async def take(self, serial: int, calls: Sequence[Call]) -> None:
        """Start the calls of a message; `answers` yields their results.

        Args:
            serial: Number of the message, from 0; Ray may deliver messages out of order.
            calls: Calls, in order.
        """
        self._early[serial] = calls
        while self._due in self._early:
            due = self._early.pop(self._due)
            self._due += 1
            for call in due:
                self._start(call)

    def _start(self, call: Call) -> None:
        if isinstance(call, Register):
            self._kinds[call.kind] = EnvSpec(call.reference, call.isolation, call.kind)
            return
        if isinstance(call, Close):
            self._host.close(call.number)
            return
        if isinstance(call, Act):
            result: Awaitable[Any] = self._host.step(call.number, call.text, call.seconds)
        else:
            result = self._host.reset(call.number, self._kinds[call.kind], call.options, call.seed, call.seconds)
        task = asyncio.get_running_loop().create_task(self._run(call.number, result))
        self._running.add(task)
        self._idle.clear()
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._running.discard(task)
        if not self._running:
            self._idle.set()

    async def answers(self) -> AsyncIterator[bytes]:
        """Yield the results of calls as they end, lists of `Answer`, forever; see `streamed`."""
        while True:
            await self._some.wait()
            with suppress(TimeoutError):
                await asyncio.wait_for(self._idle.wait(), INTERVAL)
            self._some.clear()
            ready, self._ready = self._ready, []
            yield pickled(ready)

    async def _run(self, number: int, call: Awaitable[Any]) -> None:
        answer: Any
        try:
            answer = await call
        except tuple(FAILURES.values()) as error:
            kind = next(name for name, each in FAILURES.items() if isinstance(error, each))
            answer = Failed(kind, str(error), self._host.stuck)
        except RlsdkError as error:
            answer = error
        except Exception as error:  # not the environment's error: the worker is broken
            logging.exception("a call failed")
            answer = Failed("WorldLostError", f"{type(error).__name__}: {error}", self._host.stuck)
        self._ready.append((number, answer))
        self._some.set()


class EnvWorker:
    """Client of one worker actor.

    Attributes:
        count: Number of environments with a slot in the worker.
        stuck: Number of hanging calls, as of its last failed call.
        gone: Reason why the worker is gone; empty while it is alive.
    """

    def __init__(
        self, name: str, threads: int, log_path: Path | None, silence: float, lost: Callable[[EnvWorker, str], None]
    ) -> None:
        """Start a worker on the running event loop.

        Args:
            name: Name used in messages.
            threads: Concurrent calls in threads.
            log_path: File for the worker's output; None leaves it to Ray.
            silence: Seconds without an answer after which the worker must confirm that it is alive.
            lost: Callback for the loss of the worker, called once with the reason.
        """
        self.name, self.count, self.gone, self.stuck = name, 0, "", 0
        self._log_path, self._silence, self._lost = log_path, silence, lost
        self._actor = spawn(
            EnvWorkerActor,
            threads,
            str(log_path or ""),
            concurrency=10_000,
            watched_as=f"environment worker {name}",
            log_path=log_path or "",
            replaced=True,
            responsive=True,
        )
        self._registered: set[int] = set()
        self._busy = Busy(name, "environments")
        self._waiting: dict[int, asyncio.Future[Any]] = {}
        self._outbox: list[Call] = []
        self._flush_due = False
        self._serial = itertools.count()
        loop = asyncio.get_running_loop()
        self._heard = loop.time()
        self._tasks = [loop.create_task(self._listen()), loop.create_task(self._watch())]

    @property
    def log(self) -> str:
        """Location of the worker's output, for messages."""
        return "its output is Ray's" if self._log_path is None else f"its log is {self._log_path}"

    async def ask(self, call: Reset | Act, spec: EnvSpec) -> Any:
        """Send a call to an environment and return its answer.

        Raises:
            WorldLostError: The worker died.
            RlsdkError: The worker cannot create this kind of environment; the run ends.
            TimeoutError, RuntimeError, TypeError: The environment failed.
        """
        waiting = self._waiting[call.number] = asyncio.get_running_loop().create_future()
        self._busy.begin()
        try:
            if spec.kind not in self._registered:
                self._send(Register(spec.kind, spec.reference, spec.isolation))
                self._registered.add(spec.kind)
            self._send(call)
            answer = await waiting
        finally:
            self._waiting.pop(call.number, None)
            self._busy.end()
        if isinstance(answer, RlsdkError):
            raise answer
        if not isinstance(answer, Failed):
            return answer
        self.stuck = answer.stuck
        if answer.kind == WorldLostError.__name__:
            self.lose(answer.text)
        raise FAILURES[answer.kind](answer.text)

    def close(self, number: int) -> None:
        """Close an environment."""
        self._send(Close(number))

    def lose(self, why: str) -> None:
        """Kill the worker; all pending calls raise WorldLostError."""
        if self.gone:
            return
        self.gone = f"{self.name} is gone: {why}"
        self._fail(WorldLostError(self.gone))
        self._lost(self, why)
        self.end()

    def end(self) -> None:
        """Kill the actor and all processes that it started."""
        self.gone = self.gone or f"{self.name} was ended"
        kill(self._actor)
        for task in self._tasks:
            if not task.get_loop().is_closed():
                task.cancel()

    def _send(self, call: Call) -> None:
        if self.gone:
            if isinstance(call, Close):
                return
            raise WorldLostError(self.gone)
        self._outbox.append(call)
        if isinstance(call, Close):
            asyncio.get_running_loop().call_later(CLOSE_DELAY, self._flush)
        elif not self._flush_due:
            self._flush_due = True
            asyncio.get_running_loop().call_soon(self._flush)

    def _flush(self) -> None:
        self._flush_due = False
        calls, self._outbox = self._outbox, []
        if calls and not self.gone:
            self._actor.take.remote(next(self._serial), calls)

    async def _listen(self) -> None:
        """Receive answers until the worker is gone."""
        try:
            answers: list[Answer]
            async for answers in streamed(self._actor.answers):
                self._heard = asyncio.get_running_loop().time()
                for number, answer in answers:
                    waiting = self._waiting.get(number)
                    if waiting is not None and not waiting.done():
                        waiting.set_result(answer)
            self.lose("it ended")
        except Exception as error:  # noqa: BLE001 - whoever waits for this worker gets it
            if getattr(error, "actor_init_failed", False):
                self.gone = f"{self.name} did not start: {error}; {self.log}"
                self._fail(EnvironmentFault(self.gone))
            else:
                self.lose(described(error))

    async def _watch(self) -> None:
        """Kill a worker that does not start, or later does not answer `about`, since a call blocks its process."""
        loop = asyncio.get_running_loop()
        if not await self._answers(START):
            return self.lose(f"it did not start within {START:g} s")
        while True:
            await asyncio.sleep(self._silence)
            if not self._waiting or loop.time() - self._heard < self._silence:
                continue
            if not await self._answers(self._silence):
                return self.lose(
                    f"it did not answer for {2 * self._silence:g} s, since a call blocks its whole process, or the "
                    "network does not reach it"
                )

    async def _answers(self, seconds: float) -> bool:
        """Return True if the worker answers `about` in time, or is already gone, which `_listen` reports."""
        asked = asyncio.ensure_future(self._actor.about.remote())
        done, _ = await asyncio.wait({asked}, timeout=seconds)
        if not done:
            asked.cancel()
        elif asked.exception() is None:
            self._heard = asyncio.get_running_loop().time()
        return bool(done)

    def _fail(self, error: Exception) -> None:
        for waiting in self._waiting.values():
            if not waiting.done():
                waiting.set_exception(error)
