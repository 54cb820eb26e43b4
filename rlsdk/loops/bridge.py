"""Calls from one event loop to another, and the loop of user coroutines."""

from __future__ import annotations

import asyncio
import contextvars
import logging
import threading
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, Generic, TypeVar

import attrs

from rlsdk.errors import described
from rlsdk.isolation.watching import CURRENT
from rlsdk.loops.watch import BLOCKED_SECONDS, LoopWatch, unfinished

log = logging.getLogger(__name__)
T = TypeVar("T")
CANCEL_SECONDS = 2.0
"""Seconds to wait for a cancelled call; code that blocks its loop does not notice and is abandoned."""
CLOSE_SECONDS = 5.0
"""Seconds that the end of a run waits for user coroutines that are still running."""
_NAMED = 3
"""Maximum number of places in user code that the message about it names."""


@attrs.define(eq=False)
class _Call(Generic[T]):
    """A coroutine on the target loop, with the future on the source loop that receives its outcome.

    `settled` is True once the outcome has reached the source loop.
    """

    work: Callable[[], Awaitable[T]]
    outcome: asyncio.Future[T]
    context: contextvars.Context = attrs.field(factory=contextvars.copy_context)
    task: asyncio.Task[T] | None = None
    settled: bool = False


class LoopBridge:
    """Run coroutines on another event loop, with cancellation, exceptions and context variables passed across.

    Calls made in one iteration of this loop start in one iteration of the other, in order, and outcomes return the same
    way. So requests that arrive together, which an engine would batch, still arrive together.
    """

    def __init__(self, source: asyncio.AbstractEventLoop, target: asyncio.AbstractEventLoop) -> None:
        """Connect two loops."""
        self._source, self._target = source, target
        self._sending: list[tuple[Callable[[], None], _Call[Any] | None]] = []  # only the source's thread touches it
        self._ended: list[_Call[Any]] = []  # only the target's thread touches it

    async def run(self, work: Callable[[], Awaitable[T]]) -> T:
        """Await `work()` on the target loop.

        Cancelling the call cancels the work on the target loop, and waits for it for up to `CANCEL_SECONDS`.

        Raises:
            RuntimeError: The target loop is closed.
        """
        call = _Call(work, self._source.create_future())
        self._send(partial(self._begin, call), call)
        try:
            result: T = await call.outcome
            return result
        except asyncio.CancelledError:
            if not call.settled:  # else the work itself was cancelled, or has just ended
                call.outcome = self._source.create_future()  # the other one was cancelled with this call
                self._send(partial(_cancel, call))
                await asyncio.wait([call.outcome], timeout=CANCEL_SECONDS)
            raise
        finally:
            # Its outcome is no longer read.
            if not call.outcome.cancel() and not call.outcome.cancelled():
                call.outcome.exception()

    def post_from_anywhere(self, work: Callable[[], None]) -> None:
        """Schedule a function on the target loop from any thread, without waiting and not ordered with `run`."""
        _call_on(self._target, [work])

    def _send(self, work: Callable[[], None], begun: _Call[Any] | None = None) -> None:
        if not self._sending:
            self._source.call_soon(self._flush)
        self._sending.append((work, begun))

    def _flush(self) -> None:
        sending, self._sending = self._sending, []
        if _call_on(self._target, [work for work, _ in sending]):
            return
        for _, call in sending:
            if call is not None and not call.outcome.done():
                call.outcome.set_exception(RuntimeError("the event loop of this call is closed"))

    def _begin(self, call: _Call[Any]) -> None:
        call.task = self._target.create_task(contained(call.work), context=call.context)
        call.task.add_done_callback(lambda _: self._end(call))

    def _end(self, call: _Call[Any]) -> None:
        if not self._ended:
            self._target.call_soon(self._return)
        self._ended.append(call)

    def _return(self) -> None:
        ended, self._ended = self._ended, []
        _call_on(self._source, [partial(_settle, call) for call in ended])


def is_cancelled() -> bool:
    """Return True if the running task is being cancelled from outside.

    Otherwise, a CancelledError in it was leaked by a scope of anyio, or of a client built on it.
    """
    running = asyncio.current_task()
    return running is not None and running.cancelling() > 0


async def contained(work: Callable[[], Awaitable[T]]) -> T:
    """Await work; turn a SystemExit, or another exception outside `Exception`, into an ordinary error.

    A SystemExit would end the loop; handlers of errors would miss the others, such as a panic of a library in Rust.
    """
    try:
        return await work()
    except (Exception, asyncio.CancelledError, GeneratorExit):
        raise
    except BaseException as error:
        raise RuntimeError(described(error)) from error  # names the line, which the traceback of this error lacks


def _cancel(call: _Call[Any]) -> None:
    if call.task is not None:
        call.task.cancel()


def _settle(call: _Call[Any]) -> None:
    if call.task is None:
        return
    call.settled = True
    error = None if call.task.cancelled() else call.task.exception()
    if call.outcome.done():
        return
    if call.task.cancelled():
        call.outcome.cancel()
    elif error is not None:
        call.outcome.set_exception(error)
    else:
        call.outcome.set_result(call.task.result())


def _call_on(loop: asyncio.AbstractEventLoop, functions: Sequence[Callable[[], None]]) -> bool:
    """Schedule functions in one iteration of a loop from another thread; return False if the loop is closed."""

    def call_all() -> None:
        for function in functions:
            function()

    try:
        loop.call_soon_threadsafe(call_all)
    except RuntimeError:
        return False
    return True


class UserLoop:
    """The event loop for user coroutines, monitored and in a daemon thread; both start with the first call.

    If one blocks, it delays other user code, but not the run itself. The driver's loop runs requests to engines, the
    endpoint, the ledger, signals and the watchdog. Workflows, tools, agents and rewards that are not part of rlsdk run
    on this loop; their calls into rlsdk cross back (`rollout.chat`).
    """

    def __init__(self, blocked_seconds: float = BLOCKED_SECONDS) -> None:
        """Prepare a loop; code that blocks it for `blocked_seconds` is named in the log."""
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
            await self.run(lambda: asyncio.sleep(0))

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
            found = unfinished(self._loop, self._thread, self._helpers._threads)
            more = f"; and {len(found) - _NAMED} more" if len(found) > _NAMED else ""
            log.warning(
                "user code did not end within %.0f s of the end of the run, and is abandoned: %s%s",
                *(CLOSE_SECONDS, "; ".join(found[:_NAMED]) or "an async generator that is being closed", more),
            )

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
            self._helpers = ThreadPoolExecutor(thread_name_prefix="rlsdk-user-code")
            loop.set_default_executor(self._helpers)
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
                    runner.run(self._stop.wait())
                except BaseException:  # a SystemExit in a task that nobody awaits; others continue
                    log.exception("a task of user code stopped the event loop of user code; it is running again")
