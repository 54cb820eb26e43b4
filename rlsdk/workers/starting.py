"""Start the rollout workers of a plan on the Ray cluster, or make groups in this process."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from functools import partial
from typing import Any

from rlsdk.cluster.actors import cause_of, described, died, spawn
from rlsdk.cluster.nodes import staying_nodes
from rlsdk.cluster.portable import PortablePlan, Surroundings
from rlsdk.config import Plan
from rlsdk.errors import RlsdkError, RunError
from rlsdk.plurals import counted
from rlsdk.rollout.codec import ChatTokenizer
from rlsdk.rollout.generator import Observer
from rlsdk.scoring.actors import reward_actors, reward_terms
from rlsdk.workers.actor import RolloutWorkerActor, WorkerSpec
from rlsdk.workers.local import LocalMaker, RolloutShare, local_maker
from rlsdk.workers.pool import RolloutWorkerPool

log = logging.getLogger(__name__)


@contextmanager
def group_maker(
    plan: Plan, codec: ChatTokenizer, engines: Sequence[Any], observer: Observer | None
) -> Iterator[LocalMaker | RolloutWorkerPool]:
    """Provide the group maker of a plan: this process, or rollout workers, which end with the block.

    Raises:
        RlsdkError: A worker did not start.
    """
    if not plan.config.rollout.workers:
        with local_maker(plan, codec, engines, observer) as maker:
            yield maker
        return
    with reward_actors(plan, reward_terms(plan)) as actors, _worker_pool(plan, engines, observer, actors) as pool:
        yield pool


@contextmanager
def _worker_pool(
    plan: Plan, engines: Sequence[Any], observer: Observer | None, actors: Mapping[str, Any]
) -> Iterator[RolloutWorkerPool]:
    """Context manager: start all workers, which end with the block."""
    import ray

    portable = PortablePlan.of(plan)
    nodes = [each.node for each in ray.get([engine.identity.remote() for engine in engines])]
    start = partial(_start, plan, portable, nodes, actors, observer is not None)
    count, logs = plan.config.rollout.workers, plan.folder.resolve() / "logs"
    starting = [start(rank, 0) for rank in range(count)]
    most = plan.config.placement.engine_restarts
    # Ray waits for its head as long as the network does not reach it.
    restart, actors_started = partial(asyncio.to_thread, start), [actor for actor, _ in starting]
    pool = RolloutWorkerPool(restart, actors_started, engines, most=most, logs=logs, observer=observer)
    with closing(pool):
        for rank, (_, ready) in enumerate(starting):
            try:
                ray.get(ready)
            except ray.exceptions.RayError as error:
                cause = cause_of(error)
                if isinstance(cause, RlsdkError) and not died(error):
                    raise cause from error
                path = logs / f"rollout-worker-{rank}.log"
                said = f"rollout worker {rank} did not start: {described(error, path)}; its log is {path}"
                raise RunError(said) from error
        log.info("rollouts are made by %s", counted(count, "rollout worker"))
        yield pool


def _start(
    plan: Plan,
    portable: PortablePlan,
    nodes: Sequence[str],
    actors: Mapping[str, Any],
    observed: bool,
    rank: int,
    incarnation: int,
) -> tuple[Any, Any]:
    """Start a worker; return its handle and an `ObjectRef` that resolves when it is ready."""
    path = plan.folder.resolve() / "logs" / f"rollout-worker-{rank}.log"
    actor = spawn(
        RolloutWorkerActor,
        str(path),
        node=_node(nodes, rank),
        concurrency=10_000,
        watched_as=f"rollout worker {rank}",
        log_path=path,
        replaced=plan.config.placement.engine_restarts > 0,
        responsive=True,
    )
    name = f"w{rank}" + (f"-life-{incarnation + 1}" if incarnation else "")
    share = RolloutShare(rank, plan.config.rollout.workers, name, actors)
    return actor, actor.start.remote(WorkerSpec(portable, Surroundings(), share, observed))


def _node(engines: Sequence[str], rank: int) -> str:
    """Return a node for a worker: an engine's or, if all of those are gone, this process's; "" lets Ray choose.

    Ray could choose a node whose packages were never compared, such as one that joined later.

    Args:
        engines: Nodes on which the engines were started; if there are none, Ray chooses.
        rank: Rank of the worker.
    """
    import ray

    if not engines:
        return ""
    first = rank % len(engines)
    preferred = [*engines[first:], *engines[:first], ray.get_runtime_context().get_node_id()]
    staying = {node["NodeID"] for node in staying_nodes()}
    return next((node for node in preferred if node in staying), "")
