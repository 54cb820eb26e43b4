"""A pool of environment workers: Ray actors that start when first needed, and are replaced if lost."""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import attrs

from rlsdk.components import Isolation, Use
from rlsdk.config import Plan
from rlsdk.config.schema import EnvironmentsSection
from rlsdk.contracts import EnvHandle
from rlsdk.environments.actor import Act, EnvWorker, Reset
from rlsdk.environments.host import EnvSpec
from rlsdk.environments.local import EnvCalls, EnvSpecs
from rlsdk.plugins import Plugins
from rlsdk.types import Observation, Step

log = logging.getLogger(__name__)
SILENCE = 30.0
"""Default seconds without an answer after which a worker must confirm that it is alive."""
MOST_STUCK = 16
"""Number of hanging calls at which a worker gets no more environments; it ends with its last one."""


class EnvPlaces:
    """Slots for environments, assigned in FIFO order.

    Rollouts with several environments can deadlock: each holds a slot and waits for one held by another. If all slots
    are held by waiting rollouts, one of them gets a slot beyond the limit, with a warning.
    """

    def __init__(self, count: int) -> None:
        """Create the slots."""
        self._count, self._warned = count, False
        self._held: Counter[object] = Counter()
        self._waiting: dict[asyncio.Future[None], object] = {}
        self._requests: Counter[object] = Counter()

    async def acquire(self, owner: object) -> None:
        """Wait for a slot."""
        place = asyncio.get_running_loop().create_future()
        self._waiting[place] = owner
        self._requests[owner] += 1
        self._give()
        try:
            await place
        except asyncio.CancelledError:
            if place in self._waiting:
                self._withdraw(place)
            if not place.cancelled():  # it already had the slot
                self.release(owner)
            raise

    def release(self, owner: object) -> None:
        """Release a slot of a rollout."""
        _discount(self._held, owner)
        self._give()

    def _give(self) -> None:
        while self._waiting:
            place = next(iter(self._waiting))
            if place.cancelled():
                self._withdraw(place)
                continue
            if self._held.total() >= self._count:
                if any(owner not in self._requests for owner in self._held):
                    return
                place = next(each for each, owner in self._waiting.items() if owner in self._held)
                self._warn()
            self._held[self._withdraw(place)] += 1
            place.set_result(None)

    def _withdraw(self, place: asyncio.Future[None]) -> object:
        """Remove a request, and return its owner."""
        owner = self._waiting.pop(place)
        _discount(self._requests, owner)
        return owner

    def _warn(self) -> None:
        if not self._warned:
            self._warned = True
            log.warning(
                "environments: all %d slots (workers × per_worker) are held by rollouts that wait for another "
                "environment. To end the deadlock, more are opened than the limit allows: raise "
                "environments.per_worker to the number of concurrent rollouts × the environments of each",
                self._count,
            )


def _discount(counts: Counter[object], owner: object) -> None:
    """Decrement an owner's count, and drop the owner at zero."""
    counts[owner] -= 1
    if not counts[owner]:
        del counts[owner]


class EnvWorkerPool:
    """Workers that each host up to `per_worker` environments; further environments wait in FIFO order.

    Attributes:
        lost: Descriptions of workers that were lost or replaced, with reasons.
    """

    def __init__(
        self,
        plugins: Plugins | None = None,
        *,
        workers: int = 1,
        per_worker: int = 1024,
        threads: int = 64,
        isolation: Isolation | None = None,
        name: str = "environments",
        log_dir: Path | None = None,
        silence: float = SILENCE,
    ) -> None:
        """Create the pool; workers start when they are needed.

        Args:
            plugins: Plugins to look environments up in; by default, the installed ones.
            workers: Number of actors.
            per_worker: Concurrent environments per actor.
            threads: Concurrent calls per actor, except those of `async` environments.
            isolation: Isolation that overrides the environments' own marks.
            name: Name prefix of the actors and their log files.
            log_dir: Folder of log files; None leaves the workers' output to Ray.
            silence: Seconds without an answer after which a worker must confirm that it is alive.
        """
        self._specs = EnvSpecs(plugins, isolation)
        self._count, self._threads = workers, threads
        self._name, self._log_dir, self._silence = name, log_dir, silence
        self._places = EnvPlaces(workers * per_worker)
        self._workers: list[EnvWorker] = []  # workers that accept new environments
        self._given_up: list[EnvWorker] = []
        self._serial, self._numbers = itertools.count(), itertools.count()
        self.lost: list[str] = []

    def open(self, environment: Use, seed: int, seconds: float, owner: object = None) -> EnvHandle:
        """Open a handle to an environment; see `EnvBackend`."""
        spec = self._specs.of(environment)
        owner = object() if owner is None else owner
        return _PooledEnv(self, EnvCalls(self._numbers), spec, environment, seed, seconds, owner)

    def close(self) -> None:
        """Kill the workers and all processes that they started."""
        for worker in [*self._workers, *self._given_up]:
            worker.end()
        self._workers, self._given_up = [], []

    async def enter(self, owner: object) -> EnvWorker:
        """Reserve a slot for a rollout in the worker with the fewest environments; wait until one is free."""
        await self._places.acquire(owner)
        while len(self._workers) < self._count:
            name = f"{self._name}-{next(self._serial)}"
            path = None if self._log_dir is None else self._log_dir / f"{name}.log"
            self._workers.append(EnvWorker(name, self._threads, path, self._silence, self._lose))
        worker = min(self._workers, key=lambda each: each.count)
        worker.count += 1
        return worker

    def exit(self, worker: EnvWorker, number: int | None, owner: object) -> None:
        """Close an environment, if there is one, and free its slot."""
        self._places.release(owner)
        worker.count -= 1
        if number is not None:
            worker.close(number)
        if worker.stuck >= MOST_STUCK and worker in self._workers:
            self._workers.remove(worker)
            self._given_up.append(worker)
            self._note(f"{worker.name}: {worker.stuck} calls hang; a new worker replaces it")
        if worker in self._given_up and not worker.count:
            self._given_up.remove(worker)
            worker.end()

    def _lose(self, worker: EnvWorker, why: str) -> None:
        for group in (self._workers, self._given_up):
            if worker in group:
                group.remove(worker)
        self._note(f"{worker.name}, with {worker.count} environments: {why}; {worker.log}")

    def _note(self, what: str) -> None:
        self.lost.append(what)
        log.warning("environment worker lost: %s", what)


class _PooledEnv:
    """Handle of an environment that runs in a worker."""

    def __init__(
        self,
        pool: EnvWorkerPool,
        calls: EnvCalls,
        spec: EnvSpec,
        environment: Use,
        seed: int,
        seconds: float,
        owner: object,
    ) -> None:
        self._pool, self._calls, self._spec, self._owner = pool, calls, spec, owner
        self._environment, self._seed, self._seconds = environment, seed, seconds
        self._worker: EnvWorker | None = None
        self._closed = 0

    async def reset(self) -> Observation:
        if self._worker is None:
            closed = self._closed
            worker = await self._pool.enter(self._owner)
            if closed != self._closed:  # nothing else would close it
                self._pool.exit(worker, None, self._owner)
                raise RuntimeError("the environment was closed while its reset waited for a free worker")
            self._worker = worker
        old, number = self._calls.renew()
        if old is not None:
            self._worker.close(old)
        options = dict(self._environment.options)
        call = Reset(number, self._spec.kind, options, self._seed, self._seconds)
        answer: Observation = await self._calls.call(self._worker.ask(call, self._spec))
        return answer

    async def step(self, text: str) -> Step:
        call = Act(self._calls.for_step(), text, self._seconds)
        if self._worker is None:
            raise RuntimeError("step was called after close")
        answer: Step = await self._calls.call(self._worker.ask(call, self._spec))
        return answer

    def close(self) -> None:
        self._closed += 1
        worker, self._worker = self._worker, None
        if worker is not None:
            self._pool.exit(worker, self._calls.number, self._owner)


@attrs.frozen
class EnvWorkerPools:
    """Worker pools of a run: for training, and for evaluation if it has its own."""

    train: EnvWorkerPool
    eval: EnvWorkerPool | None


@contextmanager
def env_worker_pools(plan: Plan, *, sharing: int = 1, of: str = "") -> Iterator[EnvWorkerPools]:
    """Provide the worker pools of a plan; workers start when needed and are killed at the end of the block.

    Args:
        plan: Plan of the run.
        sharing: Number of processes that share the workers, each with its own pools.
        of: Name of this process, included in the workers' names; empty if there is only one.
    """

    def create(section: EnvironmentsSection, name: str) -> EnvWorkerPool:
        options = attrs.asdict(section) | {"workers": max(1, section.workers // sharing)}
        return EnvWorkerPool(plan.plugins, **options, name=f"{name}{of}", log_dir=plan.folder.resolve() / "logs")

    evaluation = plan.config.eval.environments
    pools = EnvWorkerPools(
        create(plan.config.environments, "environments"),
        None if evaluation is None else create(evaluation, "eval-environments"),
    )
    try:
        yield pools
    finally:
        pools.train.close()
        if pools.eval is not None:
            pools.eval.close()
