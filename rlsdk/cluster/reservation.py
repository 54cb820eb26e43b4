"""Reserve the GPUs of a run with Ray, so that every actor sees exactly its own GPUs."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

import attrs

from rlsdk.cluster.draining import staying_nodes
from rlsdk.cluster.gpus import GPUMap, GPUNode, GPUPlace
from rlsdk.config.schema import PlacementSection, RoleSection
from rlsdk.contracts import ApartRole
from rlsdk.errors import EnvironmentFault

RESERVE_SECONDS = 60.0
"""Seconds to wait for GPUs that another job of the cluster may hold."""


@attrs.frozen
class GPUSeat:
    """Reserved GPUs of one actor.

    Attributes:
        group: Ray placement group that reserves GPUs of one node for this run.
        bundles: Index of the bundle of each of the actor's GPUs.
        devices: The actor's GPUs, as in `CUDA_VISIBLE_DEVICES`.
        node: Ray node id.
    """

    group: Any
    bundles: tuple[int, ...]
    devices: tuple[str, ...]
    node: str

    @property
    def environment(self) -> dict[str, str]:
        """Environment variables that make exactly its GPUs visible to the actor.

        The actor requests no GPU from Ray: Ray could place a fraction on any GPU, and has no request for an actor that
        shares two. Ray would then hide all GPUs, so these variables make it leave `CUDA_VISIBLE_DEVICES` alone.
        """
        return {
            "CUDA_VISIBLE_DEVICES": ",".join(self.devices),
            "RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES": "1",
            "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
        }


@attrs.frozen
class Reservation:
    """Seats of all engines and ranks, by their rank."""

    engines: tuple[GPUSeat, ...]
    learners: tuple[GPUSeat, ...]
    apart: Mapping[ApartRole, tuple[GPUSeat, ...]]


def gpu_nodes() -> list[GPUNode]:
    """Return the nodes of the running cluster that have GPUs, sorted by address."""
    nodes = []
    for node in staying_nodes():
        resources: Mapping[str, float] = node["Resources"]
        if resources.get("GPU", 0) >= 1:
            name = node["NodeManagerHostname"] or node["NodeManagerAddress"]
            others = {key: amount for key, amount in resources.items() if key != "GPU"}
            nodes.append(GPUNode(name, int(resources["GPU"]), others, node["NodeID"]))
    return sorted(nodes, key=lambda node: (node.name, node.id))


def reserve(
    found: GPUMap, placement: PlacementSection, apart: Mapping[ApartRole, RoleSection] | None = None
) -> Reservation:
    """Reserve the GPUs of a map in one placement group per node; they are released when the run ends.

    Args:
        found: GPUs of each actor.
        placement: Custom resources that engines and ranks reserve as well.
        apart: Custom resources of models with dedicated ranks.

    Raises:
        EnvironmentFault: The GPUs are in use.
    """
    bundles = _bundles(found, placement, apart or {})
    groups = {node: _group(found.nodes[node], [*of_node.values()]) for node, of_node in bundles.items()}
    devices = {node: _devices(groups[node], found.nodes[node], len(of_node)) for node, of_node in bundles.items()}

    def seat(place: GPUPlace) -> GPUSeat:
        numbers = tuple([*bundles[place.node]].index(gpu) for gpu in place.gpus)
        mine = tuple(devices[place.node][number] for number in numbers)
        return GPUSeat(groups[place.node], numbers, mine, found.nodes[place.node].id)

    others = {role: tuple(map(seat, places)) for role, places in found.apart.items()}
    return Reservation(tuple(map(seat, found.engines)), tuple(map(seat, found.learners)), others)


def _bundles(
    found: GPUMap, placement: PlacementSection, apart: Mapping[ApartRole, RoleSection]
) -> dict[int, dict[int, dict[str, float]]]:
    """Return the resources to reserve, node -> GPU -> resources; an actor's custom ones are with its first GPU."""
    bundles: dict[int, dict[int, dict[str, float]]] = {}
    roles = [(found.engines, placement.engine_resources), (found.learners, placement.learner_resources)]
    roles += [(places, apart[role].resources) for role, places in found.apart.items()]
    for places, resources in roles:
        for place in places:
            of_node = bundles.setdefault(place.node, {})
            for gpu in place.gpus:
                of_node.setdefault(gpu, {"GPU": 1.0})
            first = of_node[place.gpus[0]]
            for name, amount in {"CPU": 1.0, **resources}.items():
                first[name] = first.get(name, 0.0) + amount
    return bundles


def _group(node: GPUNode, bundles: Sequence[Mapping[str, float]]) -> Any:
    """Reserve bundles on a node."""
    from ray.util.placement_group import placement_group, remove_placement_group

    group = placement_group(
        [dict(bundle) for bundle in bundles], strategy="STRICT_PACK", _soft_target_node_id=node.id or None
    )
    if not group.wait(RESERVE_SECONDS):
        remove_placement_group(group)
        total: dict[str, float] = {}
        for bundle in bundles:
            for name, amount in bundle.items():
                total[name] = total.get(name, 0.0) + amount
        wanted = ", ".join(f"{amount:g} {name}" for name, amount in total.items())
        raise EnvironmentFault(
            f"Ray could not reserve {wanted} on {node.name} within {RESERVE_SECONDS:g} s: another job of the cluster "
            "holds them (`ray status` shows what is used). Wait for it, or lower placement.engines or "
            "placement.learners"
        )
    return group


def _devices(group: Any, node: GPUNode, count: int) -> list[str]:
    """Return the GPU that each bundle got.

    Raises:
        EnvironmentFault: Ray reserved them on another node.
    """
    import ray

    answers: list[tuple[str, str]] = ray.get([_ask(group, number) for number in range(count)])
    if any(found != node.id for found, _ in answers):
        raise EnvironmentFault(
            f"Ray reserved GPUs that should be on {node.name} on another node, since another job has just taken "
            "some; start the run again"
        )
    return [device for _, device in answers]


def _ask(group: Any, bundle: int) -> Any:
    """Request the node and GPU of a bundle; return the Ray reference of the answer."""
    import ray
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    def look() -> tuple[str, str]:
        return ray.get_runtime_context().get_node_id(), str(ray.get_gpu_ids()[0])

    there = PlacementGroupSchedulingStrategy(group, bundle)
    return ray.remote(look).options(num_cpus=0, num_gpus=1, scheduling_strategy=there).remote()


async def present_seat(seat: GPUSeat) -> GPUSeat:
    """Return a seat with its current GPUs: if its node is gone, wait until Ray has reserved others elsewhere.

    While a node is drained but still present, Ray neither moves reservations away from it nor uses them.
    """
    found = await asyncio.gather(*(_ask(seat.group, bundle) for bundle in seat.bundles))
    return attrs.evolve(seat, devices=tuple(device for _, device in found), node=found[0][0])
