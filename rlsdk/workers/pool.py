"""All rollout workers of a run: distribute groups over them, and replace workers that die."""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import attrs

from rlsdk.cluster.actors import ActorFailures, cause_of, died, kill, never_ran
from rlsdk.cluster.nodes import DrainingNode, on_draining
from rlsdk.errors import DataError, EngineError, RunError, described
from rlsdk.isolation.watching import note, now
from rlsdk.rollout.generator import Observer
from rlsdk.rollout.scheduler import Pausable, UnfinishedError
from rlsdk.workers.actor import RolloutWorker
from rlsdk.workers.orders import (
    Admit,
    Cancel,
    Command,
    Dismiss,
    Drain,
    EngineDied,
    GroupOrder,
    Hold,
    Interrupt,
    Logged,
    Made,
    MadeGroup,
    Make,
    MakerCounters,
    Notice,
    Release,
    Resume,
)

log = logging.getLogger(__name__)
Start = Callable[[int, int], Awaitable[tuple[Any, Any]]]
"""Start the worker of a rank, given its number of earlier starts; return its handle and an awaitable for readiness."""


@attrs.define(eq=False)
class _Job:
    """A group in progress; `worker` is None while no worker is available."""

    order: GroupOrder
    answer: asyncio.Future[Made]
    worker: RolloutWorker | None = None


class RolloutWorkerPool:
    """Make groups in workers; implements `GroupMaker`, `engines.client.EngineRoutes` and `Pausable`.

    Each group goes to the worker with the fewest outstanding rollouts. If a worker dies, others make its groups again
    from the same seeds, so each ordered group is made once.

    Attributes:
        lost: Called with rank, actor and error when a worker finds an engine dead.
        failures: A sentence for each worker death: which worker, when and why.
    """

    def __init__(
        self,
        start: Start,
        started: Sequence[Any],
        engines: Sequence[Any],
        *,
        most: int,
        logs: Path,
        observer: Observer | None,
    ) -> None:
        """Create a pool of started workers.

        Args:
            start: Starts a replacement for a dead worker.
            started: Handles of the workers, by rank.
            engines: Handles of the engines, by rank; empty if nothing is sampled.
            most: Maximum number of deaths per worker.
            logs: Folder of the worker logs.
            observer: Called with each new training rollout, its score and step; None without an observer.
        """
        self._start, self._observer = start, observer
        self._worker = partial(RolloutWorker, answered=self._answer, noticed=self._notice, lost=self._lose)
        self._numbers, self._incarnations = itertools.count(), itertools.count()
        self._engines = {rank: (next(self._incarnations), actor) for rank, actor in enumerate(engines)}
        self._samples = bool(engines)
        self._workers = {rank: self._worker(rank, actor) for rank, actor in enumerate(started)}
        self._unannounced = set(self._workers)
        self._starts = dict.fromkeys(self._workers, 1)
        self._failures = ActorFailures("rollout worker", most, logs)
        self._jobs: dict[int, _Job] = {}
        self._past = MakerCounters()
        self._interrupted = self._held = False
        self._failure: Exception | None = None
        self._changes: set[asyncio.Task[None]] = set()
        self._step = 0
        self.lost: Callable[[int, Any, Exception], None] | None = None
        self.failures = self._failures.sentences

    # Groups

    async def make(self, order: GroupOrder) -> MadeGroup:
        """See `GroupMaker.make`."""
        if self._failure is not None:
            raise self._failure
        self._step = max(self._step, order.step)
        number, job = next(self._numbers), _Job(order, asyncio.get_running_loop().create_future())
        self._jobs[number] = job
        self._assign(number, job)
        try:
            made = await job.answer
        except asyncio.CancelledError:
            if job.worker is not None:
                job.worker.send([Cancel(number)])
            raise
        finally:
            del self._jobs[number]
            if job.worker is not None:
                job.worker.load -= order.size
        if self._observer is not None:
            for rollout, score, step in made.seen:
                self._observer(rollout, score, step)
        if made.unfinished:
            raise UnfinishedError(made.made.group)
        return made.made

    def counters(self) -> MakerCounters:
        """See `GroupMaker.counters`; excludes what a dead worker counted after its last answer."""
        return sum((worker.counters for worker in self._workers.values()), self._past)

    def state(self) -> dict[str, Any]:
        """Return nothing: a configuration with rollout workers and a reward that keeps state is refused."""
        return {}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Do nothing; see `state`."""

    # Pauses

    @property
    def pausable(self) -> Pausable | None:
        """See `GroupMaker.pausable`."""
        return self if self._samples else None

    def interrupt(self) -> None:
        """See `Pausable.interrupt`."""
        self._interrupted = True
        self._tell_all([Interrupt()])

    def release(self) -> None:
        """See `Pausable.release`."""
        if self._interrupted:
            self._interrupted = False
            self._tell_all([Release()])

    @asynccontextmanager
    async def held(self) -> AsyncIterator[None]:
        """See `GroupMaker.held`; the block starts once every worker has confirmed that it no longer samples."""
        workers = [self._ready(worker) for worker in self._workers.values()]
        self._held = True  # for workers that start in the meantime
        holding = [worker.confirmed(Hold(next(self._numbers))) for worker in workers]
        try:
            await asyncio.gather(*holding)
            yield
        finally:
            self._held = False
            self._tell_all([Resume()])

    # Routes to engines

    @property
    def sampled_again(self) -> int:
        """See `EngineRoutes.sampled_again`."""
        return self.counters().sampled_again

    def admit(self, rank: int, actor: Any) -> None:
        """See `EngineRoutes.admit`."""
        incarnation = next(self._incarnations)
        self._engines[rank] = incarnation, actor
        self._tell_all([Admit(rank, incarnation, actor)])

    def dismiss(self, rank: int) -> None:
        """See `EngineRoutes.dismiss`."""
        if self._engines.pop(rank, None) is not None:
            self._tell_all([Dismiss(rank)])

    async def drain(self, rank: int) -> None:
        """See `EngineRoutes.drain`."""
        if self._engines.pop(rank, None) is not None:
            draining = [self._ready(w).confirmed(Drain(next(self._numbers), rank)) for w in self._workers.values()]
            await asyncio.gather(*draining)

    def fail(self, error: Exception) -> None:
        """See `EngineRoutes.fail`; every group in progress fails with the error."""
        self._failure = self._failure or error
        for job in self._jobs.values():
            if not job.answer.done():
                job.answer.set_exception(self._failure)

    # Workers

    def close(self) -> None:
        """Kill all workers."""
        for task in self._changes:
            if not task.get_loop().is_closed():
                task.cancel()
        for worker in self._workers.values():
            worker.end()

    async def leave(self, nodes: Sequence[DrainingNode]) -> None:
        """See `GroupMaker.leave`; a worker finishes its groups, or others make them again after the deadline."""
        staying = {worker: worker.actor for worker in self._workers.values() if not worker.leaving}
        for worker, node in (await on_draining(nodes, staying)).items():
            if not (worker.leaving or worker.gone):
                worker.leaving = True
                said = "rollout worker %d is on %s: it gets no more groups and is restarted elsewhere"
                log.warning(said, worker.rank, node)
                self._background(self._move(worker, node))

    async def _move(self, worker: RolloutWorker, node: DrainingNode) -> None:
        """Wait until a worker has finished its groups or the deadline has passed; start it on another node."""
        if unanswered := [job.answer for job in self._jobs.values() if job.worker is worker]:
            await asyncio.wait(unanswered, timeout=node.seconds_to_finish)
        if self._workers.get(worker.rank) is not worker:  # it has died in the meantime and is being replaced
            return
        if unmade := self._remove(worker):
            said = "rollout worker %d is on %s: other workers make its %d groups again"
            log.warning(said, worker.rank, node, len(unmade))
        self._background(self._restart(worker.rank))
        for number, job in unmade:
            self._assign(number, job)

    def _remove(self, worker: RolloutWorker) -> list[tuple[int, _Job]]:
        """End a worker, and return its unfinished groups."""
        del self._workers[worker.rank]
        self._past += worker.counters
        worker.end()
        return [(n, job) for n, job in self._jobs.items() if job.worker is worker and not job.answer.done()]

    def _background(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._changes.add(task)
        task.add_done_callback(self._changes.discard)

    def _assign(self, number: int, job: _Job) -> None:
        """Give a group to the worker with the fewest rollouts; without workers, it waits for one."""
        staying = [worker for worker in self._workers.values() if not worker.leaving]
        job.worker = min(staying, key=lambda each: (each.load, each.rank), default=None)
        if job.worker is not None:
            job.worker.load += job.order.size
            self._ready(job.worker).send([Make(number, job.order)])

    def _ready(self, worker: RolloutWorker) -> RolloutWorker:
        """Send a new worker the state of the run; the worker may have been created before a loop was running."""
        if worker.rank in self._unannounced:
            self._unannounced.discard(worker.rank)
            commands: list[Command] = [
                Admit(rank, incarnation, actor) for rank, (incarnation, actor) in self._engines.items()
            ]
            commands += [Interrupt()] if self._interrupted else []
            commands += [Hold(next(self._numbers))] if self._held else []
            worker.send(commands)
        return worker

    def _tell_all(self, commands: Iterable[Command]) -> None:
        """Send commands to all workers; a new worker gets the resulting state instead."""
        for worker in self._workers.values():
            if worker.rank not in self._unannounced:
                worker.send(commands)

    def _answer(self, worker: RolloutWorker, number: int, answer: Any) -> None:
        job = self._jobs.get(number)
        if job is None or job.worker is not worker or job.answer.done():
            return
        if isinstance(answer, BaseException):
            job.answer.set_exception(answer)
        else:
            job.answer.set_result(answer)

    def _notice(self, worker: RolloutWorker, notice: Notice) -> None:
        if isinstance(notice, EngineDied):
            incarnation, actor = self._engines.get(notice.rank, (-1, None))
            if incarnation == notice.incarnation and self.lost is not None:
                self.lost(notice.rank, actor, EngineError(notice.reason))
        elif isinstance(notice, Logged):
            logging.getLogger(notice.logger).log(notice.level, "rollout worker %d: %s", worker.rank, notice.text)
        else:
            note(notice.actor, notice.name, now() - notice.seconds, **notice.counts)

    def _lose(self, worker: RolloutWorker, error: Exception) -> None:
        """Handle the end of a worker once: reassign its groups, and start a replacement."""
        if self._workers.get(worker.rank) is not worker:
            return
        unanswered = self._remove(worker)
        if not died(error):
            said = f"rollout worker {worker.rank} failed: {described(error)}"
            self.fail(error if isinstance(error, DataError) else RunError(said))
            return
        self._note_death(worker.rank, error, len(unanswered))
        for number, job in unanswered:
            self._assign(number, job)

    def _note_death(self, rank: int, error: BaseException, unanswered: int) -> None:
        said = self._failures.add(rank, self._step, error)
        if fault := self._failures.too_many(rank):
            self.fail(RunError(fault))
            return
        log.warning("rollout worker died and will be replaced; its %d groups are made again: %s", unanswered, said)
        self._background(self._restart(rank))

    async def _restart(self, rank: int) -> None:
        incarnation = self._starts[rank]
        self._starts[rank] += 1
        actor = None
        try:
            actor, ready = await self._start(rank, incarnation)
            await ready
        except BaseException as error:
            if actor is not None:
                kill(actor)
            if not isinstance(error, Exception):
                raise
            if never_ran(error):
                log.warning("rollout worker %d was placed on a node that no longer exists, and is placed again", rank)
                self._background(self._restart(rank))
            elif died(error):
                self._note_death(rank, error, 0)
            else:
                self.fail(RunError(f"rollout worker {rank} did not start: {described(cause_of(error))}"))
            return
        self._workers[rank] = worker = self._worker(rank, actor)
        self._unannounced.add(rank)
        self._ready(worker)
        log.info("rollout worker %d is ready", rank)
        for number, job in self._jobs.items():
            if job.worker is None and not job.answer.done():
                self._assign(number, job)
