"""The driver's side of a worker: calls made in one iteration of the event loop are sent as one message."""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rlsdk.cluster.actors import described, kill, spawn
from rlsdk.environments.actor import FAILURES, Act, Call, Close, EnvWorkerActor, Failed, Register, Reset
from rlsdk.environments.host import EnvSpec
from rlsdk.errors import EnvironmentFault, RlsdkError, WorldLostError
from rlsdk.isolation.spans import Busy

log = logging.getLogger(__name__)
START = 120.0
"""Time limit in seconds for a worker to start; importing rlsdk and environments is slow on a busy machine."""


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
        )
        self._registered: set[int] = set()
        self._busy = Busy(name, "environments")
        self._waiting: dict[int, asyncio.Future[Any]] = {}
        self._outbox: list[Call] = []
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
        if not self._outbox:
            asyncio.get_running_loop().call_soon(self._flush)
        self._outbox.append(call)

    def _flush(self) -> None:
        calls, self._outbox = self._outbox, []
        if not self.gone:
            self._actor.take.remote(next(self._serial), calls)

    async def _listen(self) -> None:
        """Receive answers until the worker is gone."""
        import ray

        try:
            async for reference in self._actor.answers.options(num_returns="streaming").remote():
                answers = await reference
                self._heard = asyncio.get_running_loop().time()
                for number, answer in answers:
                    waiting = self._waiting.get(number)
                    if waiting is not None and not waiting.done():
                        waiting.set_result(answer)
            self.lose("it ended")
        except ray.exceptions.RayError as error:
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
                    f"it did not answer for {2 * self._silence:g} s, since a call blocks its whole process"
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
