"""Ray: where actors go, how they start, how they end."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import attrs

from rlsdk.config import Plan
from rlsdk.config.schema import PlacementSection
from rlsdk.contracts import Adapter, GivesAdapter, Place, Roles, TakesAdapter
from rlsdk.engines.actor import launch as launch_engine
from rlsdk.errors import EngineError, EnvironmentFault
from rlsdk.learners.group import LearnerGroup

log = logging.getLogger(__name__)


@attrs.frozen
class Layout:
    """What each actor gets.

    Attributes:
        device: cpu or cuda.
        engine_threads: OpenMP threads of each engine.
        learner_threads: OpenMP threads of each rank.
        engine_gpus: GPUs of each engine; a fraction where learners share them.
        learner_gpus: GPUs of each rank; a fraction where engines share them.
    """

    device: str
    engine_threads: int
    learner_threads: int
    engine_gpus: float
    learner_gpus: float


def layout(placement: PlacementSection, cores: int, gpus: int) -> Layout:
    """Divide cores and GPUs among the actors.

    Args:
        placement: Counts and devices.
        cores: CPU cores of one machine.
        gpus: GPUs of the cluster.

    Raises:
        EnvironmentFault: CUDA is asked for and there are too few GPUs.
    """
    device = placement.device if placement.device != "auto" else ("cuda" if gpus else "cpu")
    threads = (
        placement.engine_threads or max(1, cores // placement.engines),
        placement.learner_threads or max(1, cores // placement.learners),
    )
    if device == "cpu":
        return Layout(device, *threads, 0, 0)
    engines = placement.engines * placement.gpus_per_engine
    needed = max(engines, placement.learners) if placement.colocate else engines + placement.learners
    if gpus < needed:
        raise EnvironmentFault(
            f"placement asks for {needed} GPUs ({engines} for engines, {placement.learners} for learners, "
            f"{'shared' if placement.colocate else 'apart'}); Ray finds {gpus}"
        )
    shared = placement.colocate
    return Layout(device, *threads, placement.gpus_per_engine * (0.5 if shared else 1.0), 0.5 if shared else 1.0)


@contextmanager
def ray_cluster(plan: Plan) -> Iterator[int]:
    """Connect to Ray, or start it for this run; yields the number of GPUs."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # no traffic that nobody asked for
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    os.environ.setdefault("RAY_worker_niceness", "0")  # 15 would let any other program starve the actors
    import ray

    placement = plan.config.placement
    quiet = {"log_to_driver": False, "logging_level": logging.WARNING, "configure_logging": False}
    address = placement.ray or os.environ.get("RAY_ADDRESS")
    if address:
        ray.init(address=address, **quiet)
    else:
        actors = placement.engines + placement.learners
        cpus = max(os.cpu_count() or 1, actors)
        ray.init(address="local", num_cpus=cpus, include_dashboard=False, **quiet)
    try:
        yield int(ray.cluster_resources().get("GPU", 0))
    finally:
        ray.shutdown()


@attrs.define
class Actors:
    """The actors of a run."""

    engines: list[Any]
    learner: LearnerGroup
    layout: Layout

    def stop(self) -> None:
        """End them."""
        import ray

        self.learner.stop()
        for engine in self.engines:
            ray.kill(engine)


def start_actors(plan: Plan, gpus: int, total_updates: int) -> Actors:
    """Start engines and learner side by side and wait until all are ready."""
    found = layout(plan.config.placement, os.cpu_count() or 1, gpus)
    adapter = exchanged_adapter(plan)
    starting = start_engines(plan, found, adapter) if plan.needs_engine else []
    learner = start_learner(plan, found, adapter, total_updates)
    return Actors(started_engines(plan, starting), learner, found)


def start_learner(plan: Plan, found: Layout, adapter: Adapter | None, total_updates: int) -> LearnerGroup:
    """Start the learner and wait until it is ready.

    Args:
        plan: Of the run.
        found: What each actor gets.
        adapter: Shape of what engines are sent in place of whole models.
        total_updates: Of the run.
    """
    placement, folder = plan.config.placement, plan.folder.resolve()
    learner = LearnerGroup.launch(
        plan.learner,
        roles(plan),
        plan.loss,
        Place(role="learner", world=placement.learners, threads=found.learner_threads, **_everywhere(plan, found)),
        total_updates=total_updates,
        gpus=found.learner_gpus,
        resources=placement.learner_resources,
        log_dir=folder / "logs",
        cache=folder / "cache",
    )
    learner.adapter_only = adapter is not None
    return learner


def start_engines(plan: Plan, found: Layout, adapter: Adapter | None = None) -> list[tuple[Any, Any]]:
    """Begin to start the engines: their handles, each with what `started_engines` waits for."""
    return [start_engine(plan, found, adapter, rank) for rank in range(plan.config.placement.engines)]


def start_engine(plan: Plan, found: Layout, adapter: Adapter | None, rank: int, life: int = 0) -> tuple[Any, Any]:
    """Begin to start one engine.

    Args:
        plan: Of the run.
        found: What each actor gets.
        adapter: Shape of what it will be sent in place of whole models.
        rank: Which one.
        life: How often it was started before: place, caches and log file stay the same.

    Returns:
        Its handle, and an `ObjectRef` that is there when it is ready.
    """
    folder, world = plan.folder.resolve(), plan.config.placement.engines
    cache = str(folder / "cache" / f"engine-{rank}")
    common = _everywhere(plan, found)
    place = Place(role="engine", rank=rank, world=world, threads=found.engine_threads, cache=cache, **common)
    # Ray gives a name back when the last handle of a dead actor is gone, whenever that is.
    name, path = f"engine-{rank}" + (f"-life-{life + 1}" if life else ""), folder / "logs" / f"engine-{rank}.log"
    wanted = plan.config.placement.engine_resources
    engine = launch_engine(
        plan.engine, place, cpus=1, gpus=found.engine_gpus, resources=wanted, name=name, log_path=path
    )
    return engine, engine.start.remote(plan.model, place, adapter)


def no_room(plan: Plan, found: Layout, count: int) -> str:
    """What Ray lacks for more engines, as the end of a sentence; empty if it has room.

    Args:
        plan: Of the run.
        found: What each actor gets.
        count: How many more.
    """
    import ray

    each = {"CPU": 1.0, "GPU": found.engine_gpus, **plan.config.placement.engine_resources}
    free = ray.available_resources()
    short = [
        f"{free.get(name, 0):g} of {n * count:g} {name}" for name, n in each.items() if free.get(name, 0) < n * count
    ]
    return f"Ray has free {', '.join(short)}" if short else ""


def started_engines(plan: Plan, starting: Sequence[tuple[Any, Any]]) -> list[Any]:
    """The engines, once all are ready.

    Raises:
        EngineError: One did not start.
    """
    import ray

    for rank, (_, started) in enumerate(starting):
        try:
            ray.get(started)
        except ray.exceptions.RayError as error:
            cause = getattr(error, "cause", None) or error
            path = plan.folder.resolve() / "logs" / f"engine-{rank}.log"
            said = f"{type(cause).__name__}: {cause}"
            raise EngineError(f"engine {rank} did not start: {said}; its log is {path}") from error
    return [engine for engine, _ in starting]


def _everywhere(plan: Plan, found: Layout) -> dict[str, Any]:
    """What is the same in every place."""
    colocated = plan.config.placement.colocate
    return {"device": found.device, "seed": plan.config.seed, "cpus": os.cpu_count() or 1, "colocated": colocated}


def exchanged_adapter(plan: Plan) -> Adapter | None:
    """The shape of the adapters that are sent in place of whole models: the learner gives them, the engine takes them.

    None where whole models are sent.

    Raises:
        EngineError: The engine takes adapters, but not this one.
    """
    engine, learner = plan.plugins.resolve(plan.engine), plan.plugins.resolve(plan.learner)
    adapter = learner.adapter if isinstance(learner, GivesAdapter) else None
    if adapter is None or not isinstance(engine, TakesAdapter):
        return None
    engine.expect_adapter(adapter)
    return adapter


def roles(plan: Plan) -> Roles:
    """The models that the learner holds."""
    reference = plan.reference if plan.needs_reference else None
    return Roles(actor=plan.model, critic=plan.model if plan.algorithm.critic else None, reference=reference)
