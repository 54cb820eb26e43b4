"""A bounded pool of threads for code that may be slow or hang."""

from __future__ import annotations

import asyncio
import queue
import threading
import weakref
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any, TypeVar

T = TypeVar("T")
MOST_STUCK = 64
"""Maximum number of hanging calls; each keeps a thread until it returns."""


def run_to_end(awaitable: Awaitable[T]) -> T:
    """Await something in a new event loop and return its result; for threads in which no loop runs."""
    return asyncio.run(awaited(awaitable))


async def awaited(awaitable: Awaitable[T]) -> T:
    """Turn an awaitable into a coroutine."""
    return await awaitable


class Threads:
    """Runs calls in threads; a call that takes too long is abandoned with its thread, which is replaced.

    The threads are daemons, so that a hanging call does not keep the process alive.
    """

    def __init__(self, limit: int) -> None:
        """Create the pool; threads start when they are needed.

        Args:
            limit: Maximum number of concurrent calls; further calls wait, and their time limit starts when they begin.
        """
        self._limit = limit
        self._idle: list[_Worker] = []
        self._stuck: set[_Worker] = set()
        self._slots: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Semaphore]
        self._slots = weakref.WeakKeyDictionary()
        weakref.finalize(self, _dismiss, self._idle)

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
        loop = asyncio.get_running_loop()
        async with self._slots.setdefault(loop, asyncio.Semaphore(self._limit)):
            if self.stuck >= MOST_STUCK:
                raise RuntimeError(f"{MOST_STUCK} calls hang; {function!r} was not started")
            worker = self._idle.pop() if self._idle else _Worker()
            future = worker.begin(function, arguments)
            try:
                done, _ = await asyncio.wait([future], timeout=seconds)
            except asyncio.CancelledError:
                self._leave(worker, future)
                raise
            if not done:
                self._leave(worker, future)
                raise TimeoutError(f"it took longer than {seconds:g} s")
            self._idle.append(worker)
            return future.result()  # type: ignore[no-any-return]

    def _leave(self, worker: _Worker, future: asyncio.Future[Any]) -> None:
        future.cancel()
        worker.dismiss()
        self._stuck.add(worker)


class _Worker:
    """A thread that runs one call after another."""

    def __init__(self) -> None:
        self._calls: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._work, name="rlsdk-call", daemon=True)
        self._thread.start()

    @property
    def busy(self) -> bool:
        """True while a call is running."""
        return self._thread.is_alive()

    def begin(self, function: Callable[..., Any], arguments: tuple[Any, ...]) -> asyncio.Future[Any]:
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Any] = loop.create_future()

        def call() -> None:
            result, error = _outcome(function, arguments)
            with suppress(RuntimeError):  # the loop has ended, so no caller waits
                loop.call_soon_threadsafe(_settle, future, result, error)

        self._calls.put(call)
        return future

    def dismiss(self) -> None:
        """End the thread after the current call."""
        self._calls.put(None)

    def _work(self) -> None:
        while (call := self._calls.get()) is not None:
            call()
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


def _settle(future: asyncio.Future[Any], result: Any, error: Exception | None) -> None:
    if future.done():
        return
    if error is not None:
        future.set_exception(error)
    else:
        future.set_result(result)


def _dismiss(workers: list[_Worker]) -> None:
    for worker in workers:
        worker.dismiss()
