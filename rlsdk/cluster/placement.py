"""Connect to Ray or start it, and divide cores and GPUs among the actors of a run."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import attrs

from rlsdk import preflight
from rlsdk.cluster.address import RayAddress
from rlsdk.cluster.gpus import ROLES, GPUMap, GPUNode, RoleName, assign_gpus
from rlsdk.cluster.health import ray_watched
from rlsdk.cluster.local_ray import silence_reports_of_actor_failures, start_ray
from rlsdk.cluster.nodes import check_nodes
from rlsdk.cluster.reservation import GPUSeat, gpu_nodes, reserve
from rlsdk.config import Plan
from rlsdk.config.schema import PlacementSection, RoleSection
from rlsdk.contracts import ApartRole, SharesSequences
from rlsdk.errors import ConfigError

VARIABLES: Mapping[str, str] = {
    "RAY_USAGE_STATS_ENABLED": "0",  # no telemetry
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "RAY_ENABLE_AUTO_CONNECT": "0",  # otherwise, a thread that calls Ray after its end starts another Ray
    "RAY_worker_niceness": "0",  # with Ray's default of 15, any other program could starve the actors
    # By default Ray keeps 100,000 calls for its dashboard, and its GCS grows by about 70 KiB per step.
    "RAY_task_events_max_num_task_in_gcs": "2000",
    # Avoid two idle workers that are never used, since a run's workers have their own environments.
    "RAY_enable_worker_prestart": "0",
    "RAY_prestart_worker_first_driver": "0",
    "RAY_gcs_rpc_server_reconnect_timeout_s": "900",  # with Ray's default of 60, a run could end while it saves
}
"""Environment variables for Ray, unless they are already set."""


@attrs.frozen
class Layout:
    """Resources of each actor.

    Attributes:
        device: cpu or cuda.
        engine_threads: OpenMP threads of each engine.
        learner_threads: OpenMP threads of each rank.
        engines: Reserved GPUs of each engine, by its rank; empty on the CPU.
        learners: Reserved GPUs of each rank of the learner; empty on the CPU.
        apart: Reserved GPUs of the ranks of models with dedicated processes; empty on the CPU.
        python: Command that starts the processes of a role instead of Python, by role; roles without one use Python.
    """

    device: str
    engine_threads: int
    learner_threads: int
    engines: tuple[GPUSeat, ...] = ()
    learners: tuple[GPUSeat, ...] = ()
    apart: Mapping[ApartRole, tuple[GPUSeat, ...]] = {}
    python: Mapping[str, str] = {}


def layout(
    plan: Plan, cores: int, gpus: int, *, roles: Sequence[RoleName | ApartRole] = ROLES, apart: bool = False
) -> Layout:
    """Divide the cores among the actors and reserve each actor's GPUs.

    Args:
        plan: Plan of the run.
        cores: CPU cores of one machine.
        gpus: GPUs of the cluster.
        roles: Roles whose actors are started here.
        apart: True if engines and learner belong to different programs, which cannot share a GPU.

    Raises:
        ConfigError: Different programs would share a GPU.
        EnvironmentFault: CUDA is requested, but there are too few GPUs, or they are in use.
    """
    placement = plan.config.placement
    device = placement.device if placement.device != "auto" else ("cuda" if gpus else "cpu")
    threads = threads_of(placement, cores)
    if device == "cpu":
        return Layout(device, *threads)
    if apart and placement.colocate:
        fault = "placement.colocate: two programs cannot take turns on a device; set placement.colocate=false"
        raise ConfigError([fault])
    reserved = reserve(gpu_map(plan, gpu_nodes(), roles), placement, sections_apart(plan))
    return Layout(device, *threads, reserved.engines, reserved.learners, reserved.apart)


def sections_apart(plan: Plan) -> dict[ApartRole, RoleSection]:
    """Return the sections of the models with dedicated processes."""
    return {role: getattr(plan.config, role) for role in plan.apart}


def threads_of(placement: PlacementSection, cores: int) -> tuple[int, int]:
    """Return the OpenMP threads of each engine and of each rank of the learner.

    Args:
        placement: Numbers of actors and, if given, threads.
        cores: CPU cores of one machine.
    """
    return (
        placement.engine_threads or max(1, cores // placement.engines),
        placement.learner_threads or max(1, cores // placement.learners),
    )


def gpu_map(plan: Plan, nodes: Sequence[GPUNode], roles: Sequence[RoleName | ApartRole] = ROLES) -> GPUMap:
    """Assign GPUs to the actors of a plan, which has no engines if nothing is sampled.

    Args:
        plan: Plan of the run.
        nodes: Nodes of the cluster.
        roles: Roles to place, among those of the plan.

    Raises:
        EnvironmentFault: There are too few GPUs for all actors.
    """
    learner = plan.plugins.resolve(plan.learner)
    neighbours = learner.sequence_parallel if isinstance(learner, SharesSequences) else 1
    wanted: list[RoleName] = ["engine"] if "engine" in roles and plan.needs_engine else []
    wanted += ["learner"] if "learner" in roles else []
    apart = {role: section for role, section in sections_apart(plan).items() if role in roles}
    return assign_gpus(plan.config.placement, nodes, neighbours=neighbours, roles=wanted, apart=apart)


@contextmanager
def ray_cluster(plan: Plan, *, trains: bool = False) -> Iterator[int]:
    """Connect to Ray, or start it for this run; yield the number of GPUs, and disconnect at the end.

    If the program is already connected, its connection is used and stays open.

    Args:
        plan: Plan of the run.
        trains: True for a program with a learner, whose nodes must see the run's folder.

    Raises:
        ConfigError: `placement.runtime_env` is not a valid Ray runtime environment, or Ray was connected without it.
        EnvironmentFault: The nodes of an existing cluster have other packages than this machine.
        RunError: Ray cannot be joined or started.
    """
    for name, value in VARIABLES.items():
        os.environ.setdefault(name, value)
    import ray

    placement = plan.config.placement
    silence_reports_of_actor_failures()
    if ray.is_initialized():
        connected_with = dict(ray.get_runtime_context().runtime_env)
        if missing := sorted(placement.runtime_env.keys() - connected_with.keys()):
            raise ConfigError(
                [
                    "placement.runtime_env: this program connected to Ray before rlsdk did, without "
                    f"{', '.join(missing)}; remove `ray.init`, or pass it this runtime_env"
                ]
            )
        with ray_watched(started=False):
            yield int(ray.cluster_resources().get("GPU", 0))
        return
    quiet: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.WARNING, "configure_logging": False}
    if placement.runtime_env:
        quiet["runtime_env"] = _runtime_env(placement)
    address = RayAddress.find(placement)
    if address is not None:
        address.join(**quiet)
        try:
            check_nodes(plan, trains=trains)
        except BaseException:
            ray.shutdown()
            raise
    else:
        # Ray logs at every start whether it requires a token, which is noise for a cluster on loopback.
        logging.getLogger("ray._private.authentication").setLevel(logging.ERROR)
        apart = sum(section.ranks for section in sections_apart(plan).values())
        actors = placement.engines + placement.learners + apart
        cpus = max(os.cpu_count() or 1, actors)
        start_ray(num_cpus=cpus, **quiet)
    try:
        with ray_watched(started=address is None):
            gpus = int(ray.cluster_resources().get("GPU", 0))
            # Ray also counts the GPUs of a machine whose torch is built for CPUs.
            usable = address is not None or (gpus and preflight.gpu_count())
            yield gpus if usable else 0
    finally:
        ray.shutdown()


def _runtime_env(placement: PlacementSection) -> dict[str, Any]:
    """Return the runtime environment of all actors, checked by Ray."""
    from ray.runtime_env import RuntimeEnv

    given = dict(placement.runtime_env)
    try:
        RuntimeEnv(**given)
    except (TypeError, ValueError) as error:
        raise ConfigError([f"placement.runtime_env: {error}; its keys are those of Ray's runtime_env"]) from error
    return given


def no_room(plan: Plan, found: Layout, now: int, wanted: int) -> str:
    """Return what is missing for more engines, as the end of a sentence; empty if nothing is.

    Args:
        plan: Plan of the run.
        found: Resources of each actor.
        now: Current number of engines.
        wanted: Desired number of engines, which is greater.
    """
    import ray

    if found.engines:  # their GPUs stay reserved as long as the node exists
        if wanted > len(found.engines):
            return (
                f"this run reserved GPUs for {len(found.engines)} engines when it started; for more, end it and resume "
                f"it with placement.engines={wanted}"
            )
        alive = {node["NodeID"] for node in ray.nodes() if node["Alive"]}
        return "" if all(seat.node in alive for seat in found.engines) else "a node with GPUs of engines is gone"
    each = {"CPU": 1.0, **plan.config.placement.engine_resources}
    free, count = ray.available_resources(), wanted - now
    short = [
        f"{free.get(name, 0):g} of {n * count:g} {name}" for name, n in each.items() if free.get(name, 0) < n * count
    ]
    return f"Ray has free {', '.join(short)}" if short else ""


def placed_everywhere(plan: Plan, found: Layout) -> dict[str, Any]:
    """Return the fields that all actors' specs share."""
    colocated = plan.config.placement.colocate
    return {"device": found.device, "seed": plan.config.seed, "cpus": os.cpu_count() or 1, "colocated": colocated}
