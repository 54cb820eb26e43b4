"""The event loop for user coroutines: if one blocks, it delays other user code, but not the run itself.

The driver's loop runs requests to engines, the endpoint, the ledger, signals and the watchdog. Workflows, tools,
agents and rewards that are not part of rlsdk run on this loop; their calls into rlsdk cross back (`rollout.chat`).
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

from rlsdk.isolation.watching import CURRENT
from rlsdk.loops.bridge import LoopBridge
from rlsdk.loops.watch import BLOCKED_SECONDS, LoopWatch, culprit

log = logging.getLogger(__name__)
T = TypeVar("T")
CLOSE_SECONDS = 5.0
"""Seconds that the end of a run waits for user coroutines that are still running."""


class UserLoop:
    """A monitored event loop in a daemon thread; both start with the first call."""

    def __init__(self, blocked_seconds: float = BLOCKED_SECONDS) -> None:
        """Prepare a loop.

        Args:
            blocked_seconds: Seconds without an iteration after which the log names the blocking code.
        """
        self._blocked_seconds = blocked_seconds
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stop = asyncio.Event()
        self._closed = False
        self._bridges: dict[asyncio.AbstractEventLoop, tuple[LoopBridge, LoopBridge]] = {}

    def __enter__(self) -> UserLoop:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    async def answer(self) -> None:
        """Return once this loop responds; immediately if it has not started."""
        if self._loop is not None and not self._closed:
            await self.run(_nothing)

    async def run(self, work: Callable[[], Awaitable[T]]) -> T:
        """Await `work()` on this loop; call it from another loop.

        Raises:
            RuntimeError: This loop is closed.
        """
        return await self._between()[0].run(work)

    def way_back(self) -> LoopBridge:
        """Return the bridge from this loop to the running one."""
        return self._between()[1]

    def close(self) -> None:
        """Cancel running tasks and end the thread; name and abandon code that blocks it."""
        self._closed = True
        if self._loop is None:
            return
        self._watch.close()
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(CLOSE_SECONDS)
        if self._thread.is_alive():
            log.warning("user code is still running at the end of the run, and is abandoned: %s", culprit(self._thread))

    def _between(self) -> tuple[LoopBridge, LoopBridge]:
        """Return the bridges from the running loop to this one, and back."""
        caller = asyncio.get_running_loop()
        if caller not in self._bridges:
            loop = self._started()
            self._bridges[caller] = LoopBridge(caller, loop), LoopBridge(loop, caller)
        return self._bridges[caller]

    def _started(self) -> asyncio.AbstractEventLoop:
        if self._closed:
            raise RuntimeError("the event loop of user code is closed, because its run has ended")
        if self._loop is None:
            self._loop = loop = asyncio.new_event_loop()
            self._thread = threading.Thread(target=self._work, args=(loop,), name="rlsdk-user-code", daemon=True)
            self._thread.start()
            self._watch = LoopWatch(loop, self._thread, "users' code", self._blocked_seconds)
            if (watchdog := CURRENT.get()) is not None:  # it ends a run whose user code never returns
                watchdog.add_loop(loop, self._thread, "users' code", says=False)
        return self._loop

    def _work(self, loop: asyncio.AbstractEventLoop) -> None:
        with asyncio.Runner(loop_factory=lambda: loop) as runner:  # leaving it cancels running tasks
            while not self._stop.is_set():
                try:
                    runner.run(self._wait())
                except BaseException:  # a SystemExit in a task that nobody awaits; others continue
                    log.exception("a task of user code stopped the event loop of user code; it is running again")

    async def _wait(self) -> Any:
        await self._stop.wait()


async def _nothing() -> None:
    """Return at the loop's next iteration."""
