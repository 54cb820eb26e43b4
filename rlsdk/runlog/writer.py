"""Write rollouts to their database in a thread while training continues; the next call raises a failure."""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import Callable

from rlsdk.runlog.store import RolloutStore

Job = Callable[[RolloutStore], None]
_WAITING = 8
"""Maximum number of queued jobs, each about the groups of one step; `submit` waits while the queue is full."""


class RolloutWriter:
    """Runs jobs on a store in order; jobs queued at the same time share a transaction."""

    def __init__(self, store: RolloutStore) -> None:
        """Start the thread; until `close`, no other thread may use the store."""
        self._store = store
        self._jobs: queue.Queue[Job | threading.Event | None] = queue.Queue(_WAITING)
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._work, name="rollouts", daemon=True)
        self._thread.start()

    async def submit(self, job: Job) -> None:
        """Queue a job; if the queue is full, wait without blocking the event loop.

        Raises:
            BaseException: The exception of an earlier job.
        """
        await self._put(job)

    async def flush(self) -> None:
        """Wait until all submitted jobs are in the database.

        Raises:
            BaseException: The exception of a job.
        """
        done = threading.Event()
        await self._put(done)
        await asyncio.to_thread(done.wait)
        self._check()

    def close(self) -> None:
        """Wait for all jobs and end the thread.

        Raises:
            BaseException: The exception of a job, unless it was raised before.
        """
        self._jobs.put(None)
        self._thread.join()
        self._check()

    async def _put(self, job: Job | threading.Event) -> None:
        self._check()
        try:
            self._jobs.put_nowait(job)
        except queue.Full:
            await asyncio.to_thread(self._jobs.put, job)

    def _check(self) -> None:
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure

    def _work(self) -> None:
        failed, last = False, False
        while not last:
            waiting = self._take_waiting()
            last = None in waiting
            jobs = [job for job in waiting if callable(job)]
            try:
                if jobs and not failed:  # after a failure, jobs are dropped, so that no caller waits forever
                    with self._store.transaction():
                        for job in jobs:
                            job(self._store)
            except BaseException as error:  # noqa: BLE001 - raised by the next submit, flush or close
                self._failure, failed = error, True
            for flushed in waiting:
                if isinstance(flushed, threading.Event):
                    flushed.set()

    def _take_waiting(self) -> list[Job | threading.Event | None]:
        """Take all queued jobs, waiting for at least one."""
        jobs = [self._jobs.get()]
        while len(jobs) < _WAITING:
            try:
                jobs.append(self._jobs.get_nowait())
            except queue.Empty:
                break
        return jobs
