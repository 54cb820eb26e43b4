"""Batching of scoring calls across rollouts, and a cache of scores."""

from __future__ import annotations

import asyncio
import hashlib
import inspect
import math
import pickle
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from rlsdk.errors import DataError
from rlsdk.plurals import counted
from rlsdk.scoring.outcome import as_score
from rlsdk.types import Rollout, Score, Task

Take = Callable[[], Sequence[Rollout]]
"""Returns the rollouts waiting to be scored, once per call: all of them, or as many as the call should have."""

_Waiting = tuple[Rollout, "asyncio.Future[Any]"]


class Batcher:
    """Batches rollouts into calls: those of one event loop iteration, and those that arrive before a call starts."""

    def __init__(self, call: Callable[[Take], Any], most: Callable[[], int] | None = None) -> None:
        """Create a batcher.

        Args:
            call: Takes rollouts when it can score them, and returns one result each, possibly awaitable.
            most: Returns the maximum number of rollouts per call, queried before each call; by default, no limit.
        """
        self._call = call
        self._most = most
        self._loop: asyncio.AbstractEventLoop | None = None
        self._waiting: deque[_Waiting] = deque()
        self._begun = 0  # calls that have not requested rollouts yet
        self._due = False  # whether calls are begun in this event loop iteration
        self._running: set[asyncio.Task[None]] = set()  # the event loop holds only weak references

    def __call__(self, rollout: Rollout) -> asyncio.Future[Any]:
        """Return the result for one rollout."""
        loop = asyncio.get_running_loop()
        if loop is not self._loop:  # rollouts that waited for another one no longer wait
            self._loop, self._begun, self._due = loop, 0, False
            self._waiting.clear()
        future: asyncio.Future[Any] = loop.create_future()
        self._waiting.append((rollout, future))
        self._arrange()
        return future

    def _arrange(self) -> None:
        if not self._due:
            self._due = True
            asyncio.get_running_loop().call_soon(self._begin)

    def _begin(self) -> None:
        """Begin as many calls as the waiting rollouts need."""
        self._due = False
        for _ in range(math.ceil(len(self._waiting) / self._size()) - self._begun):
            self._begun += 1
            task = asyncio.get_running_loop().create_task(self._run())
            self._running.add(task)
            task.add_done_callback(self._running.discard)

    def _size(self) -> int:
        return self._most() if self._most is not None else max(len(self._waiting), 1)

    async def _run(self) -> None:
        share = _BatchShare(self._next)
        try:
            results = self._call(share.take)
            results = await results if inspect.isawaitable(results) else results
            if len(results) != len(share.taken):
                raise ValueError(
                    f"it returned {counted(len(results), 'score')} for {counted(len(share.taken), 'rollout')}"
                )
        except Exception as error:  # noqa: BLE001 - handed to each caller, which reports it
            share.take()
            for _, future in share.taken:
                if not future.done():  # the waiter may be gone
                    future.set_exception(error)
            return
        for (_, future), result in zip(share.taken, results, strict=True):
            if not future.done():
                future.set_result(result)

    def _next(self) -> list[_Waiting]:
        """Take the rollouts for a call that has started, and start a call for any left over without one."""
        self._begun -= 1
        size = self._size()
        taken: list[_Waiting] = []
        while self._waiting and len(taken) < size:
            rollout, future = self._waiting.popleft()
            if not future.done():  # the waiter may be gone
                taken.append((rollout, future))
        if self._waiting and not self._begun:
            self._arrange()
        return taken


class _BatchShare:
    """The rollouts of one call, selected when it first requests them."""

    def __init__(self, ask: Callable[[], list[_Waiting]]) -> None:
        self._ask = ask
        self._asked = False
        self.taken: list[_Waiting] = []

    def take(self) -> list[Rollout]:
        if not self._asked:
            self._asked = True
            self.taken = self._ask()
        return [rollout for rollout, _ in self.taken]


def pickled(value: Any, rollouts: Sequence[Rollout]) -> bytes:
    """Pickle a value that contains rollouts.

    Raises:
        DataError: A task cannot be pickled, which is a fault of its source, not of the reward.
    """
    try:
        return pickle.dumps(value, protocol=5)
    except Exception as error:
        if fault := task_fault((rollout.task for rollout in rollouts), pickle.dumps):
            raise fault from error
        raise


def task_fault(tasks: Iterable[Task], dumps: Callable[[Task], bytes]) -> DataError | None:
    """Return an error that names the first task that cannot be pickled; None if all can."""
    for task in tasks:
        try:
            dumps(task)
        except Exception as error:  # noqa: BLE001 - whatever the objects in its metadata raise
            return DataError(
                f"task {task.id!r} of source {task.source!r} cannot be sent to another process: its answer or metadata "
                f"cannot be pickled ({error}); make the task source give plain values, such as text and numbers"
            )
    return None


ENTRIES = 100_000
"""Maximum number of cached scores, least recently used first out."""


class Cache:
    """Runs a reward once per distinct task, messages and status; failed calls are repeated."""

    def __init__(self, run: Callable[[Rollout], Any]) -> None:
        self._run = run
        self._kept: OrderedDict[bytes, Score] = OrderedDict()

    async def __call__(self, rollout: Rollout) -> Score:
        """Return the score of one rollout."""
        about = pickled((rollout.task, rollout.messages, rollout.status), [rollout])
        key = hashlib.blake2b(about, digest_size=16).digest()
        if (kept := self._kept.get(key)) is not None:
            self._kept.move_to_end(key)
            return kept
        result = self._run(rollout)
        result = await result if inspect.isawaitable(result) else result
        score = as_score(result)
        if score.valid:
            self._kept[key] = score
            while len(self._kept) > ENTRIES:
                self._kept.popitem(last=False)
        return score
