"""Start the engines of a plan on the Ray cluster."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs

from rlsdk.cluster.actors import described, spawn
from rlsdk.cluster.gpus import present_seat
from rlsdk.cluster.placement import Layout, layout, placed_everywhere
from rlsdk.config import Plan
from rlsdk.contracts import ActorSpec, Adapter, GivesAdapter, TakesAdapter, Weights
from rlsdk.engines.actor import EngineActor
from rlsdk.errors import EngineError
from rlsdk.plugins import ComponentRef, Plugins

log = logging.getLogger(__name__)
PATIENCE = 60.0
"""Interval in seconds at which the log shows the free resources that a restarting engine may be waiting for."""


def launch(
    reference: ComponentRef,
    place: ActorSpec,
    *,
    cpus: float = 1,
    log_path: Path | str = "",
    watched: bool = False,
    transfer: ComponentRef | None = None,
    **options: Any,
) -> Any:
    """Launch the actor of an engine; the caller must then call its `start(model, place)`.

    Args:
        reference: Reference to the engine component.
        place: Placement of the actor; determines the environment variables of its process.
        cpus: Cores that Ray reserves.
        log_path: File for its process's output; empty leaves output to Ray.
        watched: True if the watchdog watches it.
        transfer: Reference to the weight transfer; None if weights are loaded whole.
        **options: Further arguments of `spawn`, such as `seat` and `resources`.

    Returns:
        A handle; `handle.method.remote(…)` calls a method of `EngineActor`.
    """
    return spawn(
        EngineActor,
        reference,
        str(log_path),
        transfer,
        cpus=cpus,
        environment=Plugins().resolve(reference).environment(place),
        watched_as=f"engine {place.rank}" if watched else "",
        log_path=log_path,
        responsive=True,
        **options,
    )


def start_engines(
    plan: Plan, found: Layout, adapter: Adapter | None = None, *, replaced: bool | None = None
) -> list[tuple[Any, Any]]:
    """Start the engines without waiting; return handles and refs for `started_engines`; see `start_engine`."""
    ranks = range(plan.config.placement.engines)
    return [start_engine(plan, found, adapter, rank, replaced=replaced) for rank in ranks]


def start_engine(
    plan: Plan, found: Layout, adapter: Adapter | None, rank: int, incarnation: int = 0, *, replaced: bool | None = None
) -> tuple[Any, Any]:
    """Start one engine without waiting until it is ready.

    Args:
        plan: Plan of the run.
        found: Threads and resources of each actor.
        adapter: Shape of the adapter it will receive instead of whole models; None for whole models.
        rank: Rank of the engine.
        incarnation: Number of earlier starts; placement, caches and log file stay the same.
        replaced: False if the run ends with the engine; None follows `placement.engine_restarts`.

    Returns:
        Actor handle, and an `ObjectRef` that resolves when the engine is ready.
    """
    folder, world = plan.folder.resolve(), plan.config.placement.engines
    cache = str(folder / "cache" / f"engine-{rank}")
    common = placed_everywhere(plan, found)
    place = ActorSpec(role="engine", rank=rank, world_size=world, threads=found.engine_threads, cache=cache, **common)
    # Ray releases a name only when the last handle of a dead actor is gone.
    name = f"engine-{rank}" + (f"-life-{incarnation + 1}" if incarnation else "")
    path = folder / "logs" / f"engine-{rank}.log"
    engine = launch(
        plan.engine,
        place,
        cpus=1,
        seat=found.engines[rank] if found.engines else None,
        resources=plan.config.placement.engine_resources,
        python=found.python.get("engine", ""),
        name=name,
        log_path=path,
        watched=True,
        replaced=plan.config.placement.engine_restarts > 0 if replaced is None else replaced,
        transfer=plan.weight_transfer,
    )
    return engine, engine.start.remote(plan.model, place, adapter, routing=plan.replays_routing)


async def restart_engine(
    plan: Plan, found: Layout, adapter: Adapter | None, rank: int, incarnation: int
) -> tuple[Any, Any]:
    """Start an engine to replace an earlier one, as `start_engine` does, on its current GPUs."""
    needs = {"CPU": 1.0, **plan.config.placement.engine_resources}
    if found.engines:
        needs["GPU"] = float(plan.config.placement.gpus_per_engine)
        seats = list(found.engines)
        seats[rank] = await until_ready(rank, present_seat(seats[rank]), needs)
        found = attrs.evolve(found, engines=tuple(seats))
    # Ray waits for its GCS to register a name, for a minute if the network is down.
    engine, ready = await asyncio.to_thread(start_engine, plan, found, adapter, rank, incarnation)
    return engine, until_ready(rank, ready, needs)


def started_engines(plan: Plan, starting: Sequence[tuple[Any, Any]]) -> list[Any]:
    """Wait until all engines are ready, and return them.

    Raises:
        EngineError: One did not start.
    """
    import ray

    for rank, (_, started) in enumerate(starting):
        try:
            ray.get(started)
        except ray.exceptions.RayError as error:
            path = plan.folder.resolve() / "logs" / f"engine-{rank}.log"
            raise EngineError(f"engine {rank} did not start: {described(error, path)}; its log is {path}") from error
    return [engine for engine, _ in starting]


def engines_alone(plan: Plan, gpus: int) -> list[Any]:
    """Start the engines of a plan without a learner, which are not replaced if they die; return those ready to use.

    Raises:
        EngineError: One did not start.
    """
    found = layout(plan, os.cpu_count() or 1, gpus, roles=["engine"])
    return started_engines(plan, start_engines(plan, found, replaced=False))


async def engine_clocks(engines: Sequence[Any]) -> list[dict[str, float]]:
    """Return the counters of engines that serve.

    Raises:
        EngineError: One of them has died, or its code raised.
    """
    clocks = []
    for rank, engine in enumerate(engines):
        try:
            clocks.append(await engine.health.remote())
        except Exception as error:
            raise EngineError(f"engine {rank} failed while serving: {described(error)}") from error
    return clocks


async def until_ready(rank: int, ready: Any, needs: Mapping[str, float]) -> Any:
    """Wait for a step of an engine's start and return its result; if it takes long, log the free resources.

    Args:
        rank: Rank of the engine.
        ready: Awaitable of the step.
        needs: Resources that Ray reserves for the engine.
    """
    import ray

    start = asyncio.ensure_future(ready)
    try:
        while not (await asyncio.wait({start}, timeout=PATIENCE))[0]:
            available = ray.available_resources()
            wanted = ", ".join(f"{name} {count:g}" for name, count in needs.items())
            free = ", ".join(f"{name} {available.get(name, 0):g}" for name in needs)
            log.warning("engine %d has not started yet; it needs %s; free in Ray: %s", rank, wanted, free)
        return start.result()
    finally:
        start.cancel()


async def load_weights(engines: Sequence[Any], weights: Weights) -> None:
    """Load the same weights into all engines; they are put into the object store once."""
    import ray

    shared = await asyncio.to_thread(ray.put, weights)
    await asyncio.gather(*(engine.load_weights.remote(shared) for engine in engines))


def exchanged_adapter(plan: Plan) -> Adapter | None:
    """Return the shape of adapters if they are sent instead of whole models, which learner and engine must support.

    None if whole models are sent.

    Raises:
        EngineError: The engine supports adapters, but not this one.
    """
    engine, learner = plan.plugins.resolve(plan.engine), plan.plugins.resolve(plan.learner)
    adapter = learner.adapter if isinstance(learner, GivesAdapter) else None
    if adapter is None or not isinstance(engine, TakesAdapter):
        return None
    engine.expect_adapter(adapter)
    return adapter
