"""A bounded pool of threads for code that may be slow or hang."""

from __future__ import annotations

import asyncio
import queue
import threading
import time
import weakref
from collections import deque
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, TypeVar

import attrs

T = TypeVar("T")
MOST_STUCK = 64
"""Maximum number of hanging calls; each keeps a thread until it returns."""
PATIENCE = 0.002
"""Seconds that a call waits for a busy thread before it gets another one."""


_OWN = threading.local()
"""The event loop of `run_to_end` in the current thread."""


def run_to_end(awaitable: Awaitable[T]) -> T:
    """Await something and return its result; for threads in which no event loop runs.

    All calls of a thread share an event loop, as they do in training, so that code may keep a client across calls.
    """
    if not hasattr(_OWN, "loop"):
        _OWN.loop = _ThreadLoop()
    try:
        return _OWN.loop.runner.run(awaited(awaitable))  # type: ignore[no-any-return]
    except Exception:
        raise
    except BaseException:  # interrupted: what still runs is cancelled with the loop
        _OWN.loop.runner.close()
        del _OWN.loop
        raise


class _ThreadLoop:
    """An event loop that is closed when its thread ends."""

    def __init__(self) -> None:
        self.runner = asyncio.Runner()
        closed = weakref.finalize(self, self.runner.close)
        closed.atexit = threading.current_thread() is threading.main_thread()  # another thread's loop may be running


async def awaited(awaitable: Awaitable[T]) -> T:
    """Turn an awaitable into a coroutine."""
    return await awaitable


class Threads:
    """Runs calls in threads; a call that takes too long is abandoned with its thread, which is replaced.

    A thread runs quick calls one after another, since waking a thread costs more than such a call takes; a call that
    waits for longer than `PATIENCE` gets another thread, so that slow calls run concurrently. The threads are daemons,
    so that a hanging call does not keep the process alive.
    """

    def __init__(self, limit: int) -> None:
        """Create the pool; threads start when they are needed.

        Args:
            limit: Maximum number of concurrent calls; further calls wait, and their time limit starts when they begin.
        """
        self._limit = limit
        self._stuck: set[_Worker] = set()
        self._by_loop: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, _LoopThreads]
        self._by_loop = weakref.WeakKeyDictionary()
        weakref.finalize(self, _dismiss, self._by_loop)

    @property
    def stuck(self) -> int:
        """Number of hanging calls, each in an abandoned thread."""
        self._stuck = {worker for worker in self._stuck if worker.busy}
        return len(self._stuck)

    async def call(self, function: Callable[..., T], *arguments: Any, seconds: float | None = None) -> T:
        """Run a function in a thread and return its result.

        Args:
            function: Function to call.
            *arguments: Positional arguments.
            seconds: Time limit; None for no limit.

        Raises:
            TimeoutError: The call exceeded its time limit.
            RuntimeError: Too many calls hang.
        """
        if self.stuck >= MOST_STUCK:
            raise RuntimeError(f"{MOST_STUCK} calls hang; {function!r} was not started")
        loop = asyncio.get_running_loop()
        threads = self._by_loop.get(loop)
        if threads is None:
            threads = self._by_loop[loop] = _LoopThreads(self._limit)
            weakref.finalize(loop, threads.dismiss)
        call = _ThreadCall(function, arguments, loop.create_future(), seconds)
        try:
            threads.begin(call)
            return await call.future  # type: ignore[no-any-return]
        except BaseException:  # it may still wait or run: it was cancelled, or exceeded its time limit
            self._stuck |= threads.leave(call)
            raise
        finally:
            if call.timer is not None:
                call.timer.cancel()


@attrs.define(eq=False)
class _ThreadCall:
    """A call and its state."""

    function: Callable[..., Any]
    arguments: tuple[Any, ...]
    future: asyncio.Future[Any]
    seconds: float | None
    timer: asyncio.TimerHandle | None = None
    begun: float | None = None
    result: Any = None
    error: Exception | None = None


class _LoopThreads:
    """The threads that serve one event loop, and the calls that wait for them.

    Results reach the event loop together: a thread posts them when no further call waits, and while calls wait, the
    loop collects them every `PATIENCE` seconds.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._lock = threading.Lock()
        self._waiting: deque[_ThreadCall] = deque()
        self._ended: deque[_ThreadCall] = deque()
        self._idle: list[_Worker] = []
        self._working: set[_Worker] = set()
        self._begun, self._seen = 0, 0  # calls begun: until now, and until the last tick
        self._last = 0.0  # time of the last begun call or awakened thread
        self._ticking = self._dismissed = False

    def begin(self, call: _ThreadCall) -> None:
        """Queue a call, and give it a thread at once unless one is busy with quick calls."""
        with self._lock:
            self._waiting.append(call)
            quick = bool(self._working) and time.monotonic() - self._last < PATIENCE
        if not quick:
            self._wake(1)
        loop = call.future.get_loop()
        if call.seconds is not None:
            call.timer = loop.call_later(call.seconds, self._check, call, call.seconds)
        if not self._ticking:
            self._ticking = True
            loop.call_later(PATIENCE, self._tick, loop)

    def leave(self, call: _ThreadCall) -> set[_Worker]:
        """Give up a call; return the thread that still runs it, if any."""
        with self._lock:
            if call in self._waiting:
                self._waiting.remove(call)
            left = {worker for worker in self._working if worker.call is call}
            self._working -= left
        for worker in left:
            worker.dismiss()
        return left

    def take(self, worker: _Worker) -> _ThreadCall | None:
        """Return the next call for a thread; None if there is none, or the thread was abandoned."""
        with self._lock:
            ended = worker.call
            if ended is not None:
                self._ended.append(ended)
            worker.call = self._waiting.popleft() if self._waiting and worker in self._working else None
            if worker.call is not None:
                worker.call.begun = self._last = time.monotonic()
                self._begun += 1
            elif worker in self._working:
                self._working.remove(worker)
                self._idle.append(worker)
                if self._dismissed:
                    worker.dismiss()
            post = bool(self._ended) and not self._waiting
        known = worker.call or ended
        if post and known is not None:
            try:
                known.future.get_loop().call_soon_threadsafe(self.settle)
            except RuntimeError:  # the loop has ended, so no caller waits
                self._ended.clear()
        return worker.call

    def settle(self) -> None:
        """Pass the results of ended calls to their callers."""
        while self._ended:
            call = self._ended.popleft()
            if call.future.done():
                continue
            if call.error is not None:
                call.future.set_exception(call.error)
            else:
                call.future.set_result(call.result)

    def dismiss(self) -> None:
        """End the idle threads, and the others when they become idle."""
        self._dismissed = True
        for worker in self._idle:
            worker.dismiss()

    def _check(self, call: _ThreadCall, seconds: float) -> None:
        """Fail a call that has exceeded its time limit."""
        self.settle()
        if call.future.done():
            return
        left = seconds if call.begun is None else call.begun + seconds - time.monotonic()
        if left > 0:
            call.timer = call.future.get_loop().call_later(left, self._check, call, seconds)
        else:
            call.future.set_exception(TimeoutError(f"it took longer than {seconds:g} s"))

    def _tick(self, loop: asyncio.AbstractEventLoop) -> None:
        """Collect results, and give waiting calls threads: all of them if none has begun since the last time."""
        self.settle()
        waiting = len(self._waiting)
        self._ticking = waiting > 0
        if not waiting:
            return
        loop.call_later(PATIENCE, self._tick, loop)
        count = 1 if self._begun != self._seen else waiting
        self._seen = self._begun
        try:
            self._wake(count)
        except RuntimeError as error:  # no more threads can be started
            for call in [*self._waiting]:
                if not call.future.done():
                    call.future.set_exception(error)

    def _wake(self, count: int) -> None:
        """Let up to `count` more threads run calls."""
        for _ in range(count):
            with self._lock:
                if len(self._working) >= self._limit:
                    return
                worker = self._idle.pop() if self._idle else _Worker(self)
                self._working.add(worker)
                self._last = time.monotonic()
            worker.wake()


class _Worker:
    """A thread that runs calls one after another."""

    def __init__(self, threads: _LoopThreads) -> None:
        self.call: _ThreadCall | None = None
        self._threads = threads
        self._signals: queue.SimpleQueue[bool] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._work, name="rlsdk-call", daemon=True)
        self._thread.start()

    @property
    def busy(self) -> bool:
        """True while a call is running."""
        return self._thread.is_alive()

    def wake(self) -> None:
        """Run waiting calls until there are none."""
        self._signals.put(True)

    def dismiss(self) -> None:
        """End the thread after the current call."""
        self._signals.put(False)

    def _work(self) -> None:
        while self._signals.get():
            while (call := self._threads.take(self)) is not None:
                call.result, call.error = _outcome(call.function, call.arguments)
                del call  # so that an idle thread keeps nothing alive


def _outcome(function: Callable[..., Any], arguments: tuple[Any, ...]) -> tuple[Any, Exception | None]:
    try:
        return function(*arguments), None
    except StopIteration as error:  # futures do not accept it
        return None, RuntimeError(f"StopIteration: {error}")
    except Exception as error:  # noqa: BLE001 - the caller gets it
        return None, error
    except BaseException as error:  # noqa: BLE001 - a SystemExit of foreign code must not end the training
        return None, RuntimeError(f"{type(error).__name__}: {error}")


def _dismiss(by_loop: Mapping[asyncio.AbstractEventLoop, _LoopThreads]) -> None:
    for threads in by_loop.values():
        threads.dismiss()
