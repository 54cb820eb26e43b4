"""Workers for environments: Ray actors that start when they are first needed and are replaced when they are lost."""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Awaitable
from pathlib import Path
from typing import Any, TypeVar

import attrs

from rlsdk.components import Isolation, Use
from rlsdk.contracts import World
from rlsdk.errors import EnvironmentFault, RlsdkError, WorldLostError
from rlsdk.plugins import Plugins
from rlsdk.rollout.worlds.actor import FAILURES, Failed, WorldActor
from rlsdk.rollout.worlds.host import Blueprint
from rlsdk.rollout.worlds.local import Blueprints
from rlsdk.types import Observation, Step

T = TypeVar("T")
log = logging.getLogger(__name__)
SILENCE = 30.0
"""Seconds without an answer after which a worker is asked whether it lives, and those that it has to say so."""
MOST_STUCK = 16
"""Calls that hang in one worker; with more it gets no further environments, and ends with the last that it has."""


@attrs.define(eq=False)
class Worker:
    """One actor.

    Attributes:
        name: As messages and its log file have it.
        actor: Its handle.
        guests: Environments in it.
        gone: Why it is no more; empty while it works.
        retired: It gets no further environments.
        asked: The question whether it lives, while that is open.
        learned: What it was told of components.
    """

    name: str
    actor: Any
    guests: int = 0
    gone: str = ""
    retired: bool = False
    asked: asyncio.Task[Any] | None = None
    learned: dict[int, asyncio.Future[None]] = attrs.field(factory=dict)


class Fleet:
    """The workers of one purpose. Each hosts so many environments; further ones wait in line, the first come first."""

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
        """Make it; nothing starts before it is needed.

        Args:
            plugins: Where environments are found; left out, among those that are installed.
            workers: Actors.
            per_worker: Environments at once in each.
            threads: Calls that run at once in each, those of `async` environments aside.
            isolation: In place of what the environments' marks say.
            name: Of the actors and their log files.
            log_dir: Folder of log files; None leaves what workers print to Ray.
            silence: Seconds without an answer after which a worker is asked whether it lives.
        """
        self._blueprints = Blueprints(plugins, isolation)
        self._count, self._per_worker, self._threads = workers, per_worker, threads
        self._name, self._log_dir, self._silence = name, log_dir, silence
        self._places = asyncio.Semaphore(workers * per_worker)
        self._workers: list[Worker] = []
        self._serial, self._numbers = itertools.count(), itertools.count()
        self._leaving: set[asyncio.Future[Any]] = set()
        self.lost: list[str] = []
        """Which workers were lost or replaced, and why."""

    def open(self, environment: Use, seed: int, seconds: float) -> World:
        """An environment; see `Worlds`."""
        blueprint = self._blueprints.of(environment)
        return _FleetWorld(self, next(self._numbers), blueprint, environment, seed, seconds)

    def close(self) -> None:
        """End the workers, and all that they started."""
        for worker in self._workers:
            self._kill(worker)
        self._workers.clear()

    async def enter(self) -> Worker:
        """A place in the worker that has the fewest environments, as soon as there is one."""
        await self._places.acquire()
        open_to_all = [w for w in self._workers if not w.gone and not w.retired]
        while len(open_to_all) < self._count:
            open_to_all.append(self._start())
        worker = min(open_to_all, key=lambda w: w.guests)
        worker.guests += 1
        return worker

    def exit(self, worker: Worker, number: int) -> None:
        """Give a place back."""
        worker.guests -= 1
        self._places.release()
        if worker.gone:
            return
        if worker.retired and not worker.guests:
            self._kill(worker)
            self._workers.remove(worker)
            return
        leaving = asyncio.ensure_future(_quietly(worker.actor.leave.remote(number)))
        self._leaving.add(leaving)
        leaving.add_done_callback(self._leaving.discard)

    async def learned(self, worker: Worker, blueprint: Blueprint) -> None:
        """Returns when a worker knows a component."""
        key = id(blueprint)
        if key not in worker.learned:
            telling = worker.actor.learn.remote(key, blueprint.reference, blueprint.isolation)
            worker.learned[key] = asyncio.ensure_future(_awaited(telling))
        await self.answer(worker, asyncio.shield(worker.learned[key]))

    async def answer(self, worker: Worker, call: Awaitable[T]) -> T:
        """What a worker answers.

        Raises:
            WorldLostError: It is gone, or says nothing at all any more.
            RlsdkError: It cannot make such environments.
            TimeoutError, RuntimeError, TypeError: The environment failed.
        """
        import ray

        waiting = asyncio.ensure_future(_awaited(call))
        try:
            while not (await asyncio.wait({waiting}, timeout=self._silence))[0]:
                await self._ask(worker)
        except asyncio.CancelledError:
            waiting.cancel()
            raise
        try:
            answer = waiting.result()
        except ray.exceptions.RayActorError as error:
            if getattr(error, "actor_init_failed", False):
                raise EnvironmentFault(f"{worker.name} did not start: {error}; {self._log(worker)}") from error
            self._lose(worker, "its process ended")
            raise WorldLostError(worker.gone) from error
        except ray.exceptions.RayTaskError as error:
            if isinstance(error.cause, RlsdkError):
                raise error.cause from error
            raise EnvironmentFault(f"{worker.name} failed: {error.cause}; {self._log(worker)}") from error
        if isinstance(answer, Failed):
            self._fail(worker, answer)
        return answer

    def _fail(self, worker: Worker, failed: Failed) -> None:
        error = FAILURES[failed.kind](failed.text)
        if isinstance(error, WorldLostError):
            self._lose(worker, failed.text)
        elif failed.stuck >= MOST_STUCK and not worker.retired:
            worker.retired = True
            self._note(f"{worker.name}: {failed.stuck} calls hang; it gets no further environments")
        raise error

    def _start(self) -> Worker:
        import ray

        name = f"{self._name}-{next(self._serial)}"
        path = "" if self._log_dir is None else str(self._log_dir / f"{name}.log")
        options: dict[str, Any] = {"num_cpus": 0, "max_concurrency": 2 * self._per_worker + 16}
        worker = Worker(name, ray.remote(WorldActor).options(**options).remote(self._threads, path))
        self._workers.append(worker)
        return worker

    async def _ask(self, worker: Worker) -> None:
        """Lose a worker that does not answer a question to itself; many may wait for that."""
        if worker.asked is None or worker.asked.done():
            worker.asked = asyncio.ensure_future(_awaited(worker.actor.about.remote()))
        done, _ = await asyncio.wait({worker.asked}, timeout=self._silence)
        if not done:
            self._lose(worker, f"it said nothing for {2 * self._silence:g} s: a call holds the whole process")

    def _lose(self, worker: Worker, why: str) -> None:
        if worker.gone:
            return
        worker.gone = f"{worker.name} is gone ({why})"
        self._workers.remove(worker)
        self._kill(worker)
        self._note(f"{worker.gone}; rollouts that ran in it: {worker.guests}; {self._log(worker)}")

    def _note(self, what: str) -> None:
        self.lost.append(what)
        log.warning("%s", what)

    def _log(self, worker: Worker) -> str:
        return "its output is Ray's" if self._log_dir is None else f"its log is {self._log_dir / worker.name}.log"

    def _kill(self, worker: Worker) -> None:
        import ray

        ray.kill(worker.actor)


class _FleetWorld:
    """The driver's side of an environment."""

    def __init__(
        self, fleet: Fleet, number: int, blueprint: Blueprint, environment: Use, seed: int, seconds: float
    ) -> None:
        self._fleet, self._number, self._blueprint = fleet, number, blueprint
        self._environment, self._seed, self._seconds = environment, seed, seconds
        self._worker: Worker | None = None

    async def reset(self) -> Observation:
        self._worker = worker = await self._fleet.enter()
        await self._fleet.learned(worker, self._blueprint)
        call = worker.actor.reset.remote(
            self._number, id(self._blueprint), dict(self._environment.options), self._seed, self._seconds
        )
        answer: Observation = await self._fleet.answer(worker, call)
        return answer

    async def step(self, text: str) -> Step:
        worker = self._worker
        if worker is None:
            raise RuntimeError("an environment is reset before its first step")
        answer: Step = await self._fleet.answer(worker, worker.actor.step.remote(self._number, text, self._seconds))
        return answer

    def leave(self) -> None:
        worker, self._worker = self._worker, None
        if worker is not None:
            self._fleet.exit(worker, self._number)


async def _awaited(call: Awaitable[T]) -> T:
    return await call


async def _quietly(call: Awaitable[Any]) -> None:
    """Wait for what is no concern of anybody: a worker that is gone has closed its environments, too."""
    try:
        await call
    except Exception as error:  # noqa: BLE001 - the rollout is over
        log.debug("a worker did not hear that an environment is left: %s", error)
