"""Workers for environments: Ray actors that start when they are first needed and are replaced when they are lost."""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import attrs

from rlsdk.components import Isolation, Use
from rlsdk.config import Plan
from rlsdk.config.schema import EnvironmentsSection
from rlsdk.contracts import EnvHandle
from rlsdk.environments.actor import Act, Reset
from rlsdk.environments.host import EnvSpec
from rlsdk.environments.local import EnvSpecs
from rlsdk.environments.worker import Worker
from rlsdk.plugins import Plugins
from rlsdk.types import Observation, Step

log = logging.getLogger(__name__)
SILENCE = 30.0
MOST_STUCK = 16
"""Calls that hang in one worker; with more it gets no further environments, and ends with the last that it has."""


class EnvWorkerPool:
    """The workers of one purpose. Each hosts so many environments; further ones wait in line, the first come first.

    `lost` says which workers were lost or given up, and why.
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
        self._blueprints = EnvSpecs(plugins, isolation)
        self._count, self._threads = workers, threads
        self._name, self._log_dir, self._silence = name, log_dir, silence
        self._places = asyncio.Semaphore(workers * per_worker)
        self._workers: list[Worker] = []  # those that get environments
        self._given_up: list[Worker] = []
        self._serial, self._numbers = itertools.count(), itertools.count()
        self.lost: list[str] = []

    def open(self, environment: Use, seed: int, seconds: float) -> EnvHandle:
        """An environment; see `Worlds`."""
        blueprint = self._blueprints.of(environment)
        return _FleetWorld(self, next(self._numbers), blueprint, environment, seed, seconds)

    def close(self) -> None:
        """End the workers, and all that they started."""
        for worker in [*self._workers, *self._given_up]:
            worker.end()
        self._workers, self._given_up = [], []

    async def enter(self) -> Worker:
        """A place in the worker that has the fewest environments, as soon as there is one."""
        await self._places.acquire()
        while len(self._workers) < self._count:
            name = f"{self._name}-{next(self._serial)}"
            path = None if self._log_dir is None else self._log_dir / f"{name}.log"
            self._workers.append(Worker(name, self._threads, path, self._silence, self._lose))
        worker = min(self._workers, key=lambda each: each.guests)
        worker.guests += 1
        return worker

    def exit(self, worker: Worker, number: int) -> None:
        """Give a place back."""
        self._places.release()
        worker.guests -= 1
        worker.close(number)
        if worker.stuck >= MOST_STUCK and worker in self._workers:
            self._workers.remove(worker)
            self._given_up.append(worker)
            self._note(f"{worker.name}: {worker.stuck} calls hang; another takes its place")
        if worker in self._given_up and not worker.guests:
            self._given_up.remove(worker)
            worker.end()

    def _lose(self, worker: Worker, why: str) -> None:
        for group in (self._workers, self._given_up):
            if worker in group:
                group.remove(worker)
        self._note(f"{worker.name}, with {worker.guests} environments: {why}; {worker.log}")

    def _note(self, what: str) -> None:
        self.lost.append(what)
        log.warning("environment worker lost: %s", what)


class _FleetWorld:
    """The driver's side of an environment."""

    def __init__(
        self, fleet: EnvWorkerPool, number: int, blueprint: EnvSpec, environment: Use, seed: int, seconds: float
    ) -> None:
        self._fleet, self._number, self._blueprint = fleet, number, blueprint
        self._environment, self._seed, self._seconds = environment, seed, seconds
        self._worker: Worker | None = None

    async def reset(self) -> Observation:
        if self._worker is None:
            self._worker = await self._fleet.enter()
        options = dict(self._environment.options)
        call = Reset(self._number, self._blueprint.kind, options, self._seed, self._seconds)
        answer: Observation = await self._worker.ask(call, self._blueprint)
        return answer

    async def step(self, text: str) -> Step:
        if self._worker is None:
            raise RuntimeError("an environment is reset before its first step")
        answer: Step = await self._worker.ask(Act(self._number, text, self._seconds), self._blueprint)
        return answer

    def close(self) -> None:
        worker, self._worker = self._worker, None
        if worker is not None:
            self._fleet.exit(worker, self._number)


@attrs.frozen
class EnvWorkerPools:
    """Workers for training, and those for evaluation where it has its own."""

    train: EnvWorkerPool
    eval: EnvWorkerPool | None


@contextmanager
def world_workers(plan: Plan) -> Iterator[EnvWorkerPools]:
    """Provide the worker pools of a plan: workers start when they are needed and end with the block."""

    def fleet(section: EnvironmentsSection, name: str) -> EnvWorkerPool:
        options = attrs.asdict(section)
        return EnvWorkerPool(plan.plugins, **options, name=name, log_dir=plan.folder.resolve() / "logs")

    own = plan.config.eval.environments
    fleets = EnvWorkerPools(
        fleet(plan.config.environments, "environments"), None if own is None else fleet(own, "eval-environments")
    )
    try:
        yield fleets
    finally:
        fleets.train.close()
        if fleets.eval is not None:
            fleets.eval.close()
