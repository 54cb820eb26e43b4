"""Connect to Ray or start it, and divide cores and GPUs among the actors of a run.

A private Ray starts with little output and on loopback only. Ray lacks options for much of this, so attributes of its
private modules are patched while it starts, which is why its version is pinned.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import attrs

from rlsdk import preflight
from rlsdk.cluster.address import RayAddress
from rlsdk.cluster.gpus import (
    ROLES,
    GPUMap,
    GPUNode,
    GPUSeat,
    RoleName,
    assign_gpus,
    free_gpus,
    gpu_nodes,
    gpus_released,
    reserve,
)
from rlsdk.cluster.health import ray_watched
from rlsdk.cluster.nodes import check_nodes
from rlsdk.config import Plan
from rlsdk.config.schema import PlacementSection, RoleSection
from rlsdk.contracts import ApartRole, SharesSequences
from rlsdk.errors import ConfigError, EnvironmentFault, RunError
from rlsdk.isolation.process import interrupts_kept, restore_sigterm

log = logging.getLogger(__name__)
START_ATTEMPTS = 3
"""Number of attempts to start Ray before the run fails."""


def silence_reports_of_actor_failures() -> None:
    """Stop Ray from printing a screenful for each process that ends; rlsdk logs one line with process and reason.

    Ray 2.60 has no setting for it; `log_to_driver` only affects the output of workers.
    """
    from ray._private import worker

    original = worker.print_to_stdstream
    if getattr(original, "silences_actor_failures", False):
        return

    def print_others(data: Mapping[str, Any], *rest: Any, **options: Any) -> None:
        if not str(data["lines"][0]).startswith("A worker died or was killed"):
            original(data, *rest, **options)

    print_others.silences_actor_failures = True  # type: ignore[attr-defined]
    worker.print_to_stdstream = print_others


def start_ray(**options: Any) -> None:
    """Start Ray on this machine, with retries, since its 30 s startup timeout is too short on a busy machine.

    Raises:
        RunError: No attempt succeeded; the message has Ray's reason and the load of the machine.
    """
    import psutil
    import ray

    this = psutil.Process()
    before = set(this.children(recursive=True))
    for attempt in range(1, START_ATTEMPTS + 1):
        try:
            with interrupts_kept(), _on_loopback(), _quickly(), _own_sigterm():
                ray.init(address="local", include_dashboard=False, **options)
            return
        except ValueError:  # caused by arguments or machine, such as too little shared memory: a retry would not help
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
                    f"Ray did not start on this machine in {attempt} attempts ({load}); the last error was: "
                    f"{said} Wait until the machine is less busy, or start Ray by `ray start --head` and set "
                    "placement.ray=auto; its logs are in /tmp/ray"
                ) from error
            log.warning("Ray did not start (%s): %s Trying again, %d of %d", load, said, attempt + 1, START_ATTEMPTS)


@contextmanager
def _own_sigterm() -> Iterator[None]:
    """Keep the program's handler of SIGTERM, if it has one; Ray's ends it with status 15, whatever it is doing."""
    from ray._private import utils

    before = utils.set_sigterm_handler
    if signal.getsignal(signal.SIGTERM) != signal.SIG_DFL:
        utils.set_sigterm_handler = lambda handler: None
    try:
        yield
    finally:
        utils.set_sigterm_handler = before
        restore_sigterm()


@contextmanager
def _on_loopback() -> Iterator[None]:
    """Make a single-machine cluster listen only on 127.0.0.1.

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


@contextmanager
def _quickly() -> Iterator[None]:
    """Make Ray start only the processes that a run needs: GCS, raylet, workers, and the runtime-env agent.

    This saves about four CPU seconds per start: no dashboard head (which Ray starts for usage statistics even without a
    dashboard), no dashboard agent, no autoscaler and no log monitor. Ray's worker setup script imports half of Ray;
    `setup_worker` does not. Ray checks once a second whether its raylet has registered, although that takes less than
    half a second, so this polls faster.
    """
    from ray._private import node, parameter, ray_constants, services, utils
    from ray._raylet import GcsClient  # type: ignore[attr-defined]  # not in its stub

    folder, python = Path(__file__).parent, services._build_python_executable_command_memory_profileable
    registered = services.get_node

    def no_head(self: Any, **_: Any) -> None:
        self._webui_url = ""

    def no_agent(component: str, *rest: Any, **options: Any) -> list[str]:
        if component == ray_constants.PROCESS_TYPE_DASHBOARD_AGENT:
            return [sys.executable, "-I", "-S", str(folder / "no_agent.py")]
        return list(python(component, *rest, **options))

    def soon_registered(gcs_address: str, node_id: str) -> Any:
        client = GcsClient(address=gcs_address)
        end = time.monotonic() + 10
        # Without a timeout, a call to a GCS that was killed would never return.
        while time.monotonic() < end and node_id not in {each.hex() for each in client.get_all_node_info(timeout=5)}:
            time.sleep(0.01)
        return registered(gcs_address, node_id)

    params = partial(
        parameter.RayParams,
        no_monitor=True,
        include_log_monitor=False,
        setup_worker_path=str(folder / "setup_worker.py"),
    )
    with ExitStack() as stack:
        for where, replacement in (
            ((parameter, "RayParams"), params),
            ((node.Node, "start_api_server"), no_head),
            ((services, "get_node"), soon_registered),
            ((services, "_build_python_executable_command_memory_profileable"), no_agent),
            ((utils, "get_dashboard_dependency_error"), partial(ImportError, "disabled")),  # its check imports them
        ):
            stack.callback(setattr, *where, getattr(*where))
            setattr(*where, replacement)
        yield


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
    # By default, connections break if the network fails for 20 s, and one of their ends learns it minutes later.
    "RAY_grpc_keepalive_timeout_ms": "60000",
    "RAY_grpc_client_keepalive_time_ms": "60000",
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
    found = _own_gpus(plan, roles) if apart else gpu_map(plan, gpu_nodes(), roles)
    reserved = reserve(found, placement, sections_apart(plan))
    return Layout(device, *threads, reserved.engines, reserved.learners, reserved.apart)


def _own_gpus(plan: Plan, roles: Sequence[RoleName | ApartRole]) -> GPUMap:
    """Assign GPUs to the roles of one of a run's two programs.

    Both programs compute the same map of all roles, so that neither takes what the other needs. If others use these
    GPUs, it takes free ones: a node may have been lost, and the other program holds what it got before.

    Raises:
        EnvironmentFault: There are too few GPUs for all roles.
    """
    nodes = gpu_nodes()
    found, free = gpu_map(plan, nodes).only(roles), free_gpus(nodes)
    if all(free[node].gpus >= count for node, count in found.counts.items()):
        return found
    try:
        return gpu_map(plan, free, roles)
    except EnvironmentFault:
        return found  # those in use may soon be released


def sections_apart(plan: Plan) -> dict[ApartRole, RoleSection]:
    """Return the sections of the models with dedicated processes."""
    return {role: getattr(plan.config, role) for role in plan.apart}


def threads_of(placement: PlacementSection, cores: int) -> tuple[int, int]:
    """Return the OpenMP threads of each engine and of each rank of the learner."""
    return (
        placement.engine_threads or max(1, cores // placement.engines),
        placement.learner_threads or max(1, cores // placement.learners),
    )


def gpu_map(plan: Plan, nodes: Sequence[GPUNode], roles: Sequence[RoleName | ApartRole] = ROLES) -> GPUMap:
    """Assign GPUs to the actors of a plan, which has no engines if nothing is sampled.

    Raises:
        EnvironmentFault: There are too few GPUs for all actors.
    """
    learner = plan.plugins.resolve(plan.learner)
    neighbours = learner.sequence_parallel if isinstance(learner, SharesSequences) else 1
    wanted: list[RoleName] = ["engine"] if "engine" in roles and plan.needs_engine else []
    wanted += ["learner"] if "learner" in roles else []
    apart = {role: section for role, section in sections_apart(plan).items() if role in roles}
    return assign_gpus(plan.config.placement, nodes, neighbours=neighbours, roles=wanted, apart=apart)


def joins_ray(placement: PlacementSection) -> bool:
    """Return whether a run joins a Ray cluster, which must be reachable; False if it starts its own.

    Raises:
        RunError: The cluster cannot be reached, or requires a token that this process lacks.
    """
    ray = sys.modules.get("ray")  # a program that has connected has imported it
    if ray is not None and ray.is_initialized():
        return True
    if (address := RayAddress.find(placement)) is None:
        return False
    _set_variables()
    address.check()
    return True


def _set_variables() -> None:
    """Set the variables that Ray reads when it is imported."""
    for name, value in VARIABLES.items():
        os.environ.setdefault(name, value)


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
    _set_variables()
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
        with gpus_released(), ray_watched(started=False):
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
            _leave_ray()
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
        _leave_ray()


def _leave_ray() -> None:
    """Disconnect from Ray, or stop it; Ray's core then makes SIGTERM end the process at once, which is undone."""
    import ray

    ray.shutdown()
    restore_sigterm()


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
    """Return what is missing for more engines, as the end of a sentence; empty if nothing is."""
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
