"""Support for trainers that are called by hand: steps that finish their update, rollouts on a loop in a thread.

A script may call `asyncio.run(trainer.step())` repeatedly, each time with a new event loop; a notebook already runs
one. Engine clients and running tasks belong to one event loop, so a thread keeps that loop alive.
"""

from __future__ import annotations

import asyncio
import logging
import signal
import threading
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager, suppress
from contextvars import copy_context
from functools import partial, wraps
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from rlsdk.contracts.rollouts import Rollouts, SamplesPrompts, TakenBatch
from rlsdk.contracts.training import CountsTraining
from rlsdk.errors import RunError, ValueFault

if TYPE_CHECKING:
    from rlsdk.contracts import Completion, Sampling
    from rlsdk.contracts.rollouts import TaskCounts, TaskStatus
    from rlsdk.trainer.trainer import Trainer

log = logging.getLogger(__name__)
T = TypeVar("T")


def in_event_loop() -> bool:
    """Return True if an event loop is running in this thread, as in a notebook."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True


def run_async(work: Coroutine[Any, Any, T], interrupt: Callable[[], object] | None = None) -> T:
    """Run a coroutine to completion; in a thread if an event loop is already running, as in a notebook.

    Args:
        work: The coroutine.
        interrupt: Called at the first Ctrl-C (the stop button of a notebook), after which the coroutine should return
            soon. Only used if an event loop is running; otherwise the coroutine handles signals itself.

    Raises:
        KeyboardInterrupt: Ctrl-C, a second one if `interrupt` is given; the coroutine has been cancelled.
    """
    if not in_event_loop():
        return asyncio.run(work)
    cancel: Future[Callable[[], object]] = Future()

    async def cancellable() -> T:
        loop, task = asyncio.get_running_loop(), asyncio.current_task()
        assert task is not None
        cancel.set_result(partial(loop.call_soon_threadsafe, task.cancel))
        return await work

    with ThreadPoolExecutor(1) as pool, _sigints() as sigints:
        running = pool.submit(copy_context().run, asyncio.run, cancellable())  # with the watchdog of the run
        while wait([running], timeout=0.1).not_done:
            if sigints.empty():
                continue
            sigints.get()
            if interrupt is not None:
                interrupt()
                interrupt = None
                continue
            with suppress(RuntimeError):  # its loop is closed: it has just ended
                cancel.result()()
    try:
        return running.result()
    except asyncio.CancelledError:
        raise KeyboardInterrupt from None


@contextmanager
def _sigints() -> Iterator[SimpleQueue[int]]:
    """Queue each SIGINT of a block, in which nothing else may handle it: an exception could leave the work running.

    Without effect outside the main thread, since only that one can handle signals.
    """
    queue: SimpleQueue[int] = SimpleQueue()
    if threading.current_thread() is not threading.main_thread():
        yield queue
        return
    before = signal.signal(signal.SIGINT, lambda number, _: queue.put(number))
    try:
        yield queue
    finally:
        signal.signal(signal.SIGINT, before)


def whole_updates(step: Callable[[Trainer], Coroutine[Any, Any, dict[str, float]]]) -> Callable[[Trainer], Any]:
    """Make a cancellation that comes during the update of a step take effect at the end of the step.

    Otherwise the next call would train on the same batch again. A second cancellation takes effect at once. `train`
    handles interrupts itself, and is cancelled only if it hangs.

    After an exception, the step may be repeated unless the learner has trained in it. A learner that does not count its
    calls (`CountsTraining`) may have.
    """

    @wraps(step)
    async def run(trainer: Trainer) -> dict[str, float]:
        trainer.check_usable()
        counts = trainer.learner if isinstance(trainer.learner, CountsTraining) else None
        before = None if counts is None else counts.training_calls
        try:
            return await (step(trainer) if trainer.in_training else _uncut(trainer, step(trainer)))
        except Exception:
            if counts is not None and counts.training_calls == before:
                trainer.updating = False
            raise

    return run


async def _uncut(trainer: Trainer, step: Coroutine[Any, Any, dict[str, float]]) -> dict[str, float]:
    """Await a step; if it is cancelled once its update has begun, finish it before raising `CancelledError`."""
    before, running, cancelled = trainer.version, asyncio.ensure_future(step), None
    while not running.done():
        try:
            await asyncio.wait([running])
        except asyncio.CancelledError as error:
            if cancelled is None and (trainer.updating or trainer.version > before):
                log.warning("interrupted: step %d will be finished first; interrupt again to end at once", before + 1)
            else:
                running.cancel()
            cancelled = error
    metrics = await running
    if cancelled is not None:
        raise cancelled
    return metrics


def sampled_by_hand(rollouts: Rollouts) -> SamplesPrompts:
    """Return rollouts whose engines can be called by hand.

    Raises:
        RunError: They do not offer it.
    """
    if not isinstance(rollouts, SamplesPrompts):
        raise RunError(f"{type(rollouts).__name__} has no method `sample`, so its engines cannot be called by hand")
    return rollouts


def _threaded(name: str) -> Callable[..., Coroutine[Any, Any, Any]]:
    """Return a method that calls the method `name` of the rollouts on their loop."""

    async def call(self: ThreadedRollouts, *arguments: Any, **named: Any) -> Any:
        return await self.run(getattr(self._rollouts, name)(*arguments, **named))

    return call


class ThreadedRollouts:
    """Proxy that lets any event loop call rollouts, which run on their own loop in a thread."""

    def __init__(self, rollouts: Rollouts) -> None:
        self._rollouts = rollouts
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="rollouts", daemon=True)
        self._thread.start()

    take, publish, sleep, evaluate = map(_threaded, ("take", "publish", "sleep", "evaluate"))
    tasks, restore, snapshot = map(_threaded, ("tasks", "restore", "snapshot"))
    counters, scale, pause = map(_threaded, ("counters", "scale", "pause"))

    async def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Await a coroutine on the loop of the rollouts."""
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(work, self._loop))

    @property
    def eval_tasks(self) -> int:
        """See `Rollouts.eval_tasks`."""
        return self._rollouts.eval_tasks

    @property
    def failure(self) -> BaseException | None:
        """See `Rollouts.failure`."""
        return self._rollouts.failure

    def settle(self, taken: TakenBatch, states: Sequence[TaskStatus]) -> None:
        """See `Rollouts.settle`."""

        async def settle() -> None:
            self._rollouts.settle(taken, states)

        asyncio.run_coroutine_threadsafe(settle(), self._loop).result()

    async def sample(
        self, prompts: Sequence[np.ndarray], sampling: Sampling | None, count: int, seed: int | None
    ) -> list[list[Completion]]:
        """See `SamplesPrompts.sample`."""
        return await self.run(sampled_by_hand(self._rollouts).sample(prompts, sampling, count, seed))

    def sources(self) -> Mapping[str, TaskCounts]:
        """See `Rollouts.sources`."""
        return self._rollouts.sources()

    async def close(self) -> None:
        """Close the rollouts, then end the thread."""
        try:
            await self.run(self._rollouts.close())
        finally:
            self._loop.call_soon_threadsafe(self._loop.stop)
            await asyncio.to_thread(self._thread.join)
            self._loop.close()


def token_ids(prompt: np.ndarray | Sequence[int]) -> np.ndarray:
    """Return a prompt's token ids, int64 `[p]`.

    Raises:
        ValueFault: It is anything else, such as text.
    """
    given = np.asarray(prompt)
    if given.ndim != 1 or (given.size and given.dtype.kind not in "iu"):
        raise ValueFault(
            "sample: expected a list of prompts, each a list of token ids, [tokenizer.encode(text)]; got the prompt "
            f"{prompt!r:.60}"
        )
    return given.astype(np.int64)
