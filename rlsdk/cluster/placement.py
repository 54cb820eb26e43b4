"""Connect to Ray or start it, and divide cores and GPUs among the actors of a run."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import attrs

from rlsdk.cluster.address import RayAddress
from rlsdk.cluster.health import ray_watched
from rlsdk.config import Plan
from rlsdk.config.schema import PlacementSection
from rlsdk.errors import EnvironmentFault, RunError

log = logging.getLogger(__name__)
START_ATTEMPTS = 3
"""How often Ray is started before a run gives up."""


@attrs.frozen
class Layout:
    """Resources of each actor.

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
        EnvironmentFault: CUDA is requested and there are too few GPUs.
    """
    device = placement.device if placement.device != "auto" else ("cuda" if gpus else "cpu")
    threads = (
        placement.engine_threads or max(1, cores // placement.engines),
        placement.learner_threads or max(1, cores // placement.learners),
    )
    if device == "cpu":
        return Layout(device, *threads, 0, 0)
    if short := gpus_short(placement, gpus, "Ray finds"):
        raise EnvironmentFault(short)
    shared = placement.colocate
    return Layout(device, *threads, placement.gpus_per_engine * (0.5 if shared else 1.0), 0.5 if shared else 1.0)


def gpus_short(placement: PlacementSection, gpus: int, found: str) -> str:
    """Say that there are fewer GPUs than a placement needs; empty if there are enough.

    Args:
        placement: Counts and devices.
        gpus: Number of available GPUs.
        found: Source of that number, such as "Ray finds".
    """
    engines = placement.engines * placement.gpus_per_engine
    needed = max(engines, placement.learners) if placement.colocate else engines + placement.learners
    if gpus >= needed:
        return ""
    return (
        f"placement needs {needed} GPUs ({engines} for engines, {placement.learners} for learners, "
        f"{'shared' if placement.colocate else 'not shared'}); {found} {gpus}"
    )


@contextmanager
def ray_cluster(plan: Plan) -> Iterator[int]:
    """Connect to Ray, or start it for this run, and disconnect at the end; yield the number of GPUs."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # no telemetry
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    os.environ.setdefault("RAY_worker_niceness", "0")  # with 15, any other program could starve the actors
    # Ray would keep a hundred thousand calls for its dashboard, and its GCS grow by some 70 KiB with each step.
    os.environ.setdefault("RAY_task_events_max_num_task_in_gcs", "2000")
    os.environ.setdefault("RAY_gcs_rpc_server_reconnect_timeout_s", "900")  # 60 would end a run while it saves
    import ray

    placement = plan.config.placement
    quiet = {"log_to_driver": False, "logging_level": logging.WARNING, "configure_logging": False}
    address = RayAddress.find(placement)
    if address is not None:
        address.join(**quiet)
    else:
        # At every start Ray says whether it asks for a token; that is noise for a cluster on loopback.
        logging.getLogger("ray._private.authentication").setLevel(logging.ERROR)
        actors = placement.engines + placement.learners
        cpus = max(os.cpu_count() or 1, actors)
        _start_ray(num_cpus=cpus, include_dashboard=False, **quiet)
    try:
        with ray_watched(started=address is None):
            yield int(ray.cluster_resources().get("GPU", 0))
    finally:
        ray.shutdown()


@contextmanager
def joined_cluster(plan: Plan) -> Iterator[int]:
    """Connect as `ray_cluster` does, or use the existing connection of this process, which then stays open."""
    import ray

    if ray.is_initialized():
        yield int(ray.cluster_resources().get("GPU", 0))
        return
    with ray_cluster(plan) as gpus:
        yield gpus


def _start_ray(**options: Any) -> None:
    """Start Ray on this machine, in a few attempts: it gives its processes 30 s to start, too little on a busy machine.

    Args:
        **options: Options of `ray.init`.

    Raises:
        RunError: No attempt succeeded; the message has Ray's reason and the load of the machine.
    """
    import psutil
    import ray

    this = psutil.Process()
    before = set(this.children(recursive=True))
    for attempt in range(1, START_ATTEMPTS + 1):
        try:
            with _on_loopback():
                ray.init(address="local", **options)
            return
        except ValueError:  # of the arguments or the machine, such as too little shared memory: it would come again
            raise
        except Exception as error:
            ray.shutdown()
            for process in set(this.children(recursive=True)) - before:
                with suppress(psutil.NoSuchProcess):
                    process.kill()
            said = " ".join(str(error).split()) or type(error).__name__
            load = f"load {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores"
            if attempt == START_ATTEMPTS:
                raise RunError(
                    f"Ray did not start on this machine in {attempt} attempts ({load}); the last one ended with: "
                    f"{said} Wait until the machine has less to do, or start Ray by `ray start --head` and set "
                    "placement.ray=auto; its logs are in /tmp/ray"
                ) from error
            log.warning("Ray did not start (%s): %s Trying again, %d of %d", load, said, attempt + 1, START_ATTEMPTS)


@contextmanager
def _on_loopback() -> Iterator[None]:
    """Have a cluster of one machine listen only on 127.0.0.1.

    Ray replaces `_node_ip_address="127.0.0.1"` by another address of the machine. On Windows and macOS it listens on
    loopback because of this constant, which can be set by an environment variable only before the first import.
    """
    from ray._private import ray_constants

    before = ray_constants.ENABLE_RAY_CLUSTER
    ray_constants.ENABLE_RAY_CLUSTER = False
    try:
        yield
    finally:
        ray_constants.ENABLE_RAY_CLUSTER = before


def no_room(plan: Plan, found: Layout, count: int) -> str:
    """Say which resources Ray lacks for more engines, as the end of a sentence; empty if it lacks none.

    Args:
        plan: Plan of the run.
        found: Resources of each actor.
        count: Number of further engines.
    """
    import ray

    each = {"CPU": 1.0, "GPU": found.engine_gpus, **plan.config.placement.engine_resources}
    free = ray.available_resources()
    short = [
        f"{free.get(name, 0):g} of {n * count:g} {name}" for name, n in each.items() if free.get(name, 0) < n * count
    ]
    return f"Ray has free {', '.join(short)}" if short else ""


def placed_everywhere(plan: Plan, found: Layout) -> dict[str, Any]:
    """Return the fields that the specs of all actors share."""
    colocated = plan.config.placement.colocate
    return {"device": found.device, "seed": plan.config.seed, "cpus": os.cpu_count() or 1, "colocated": colocated}
