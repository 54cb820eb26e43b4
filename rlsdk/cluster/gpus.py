"""Assign GPUs to engines and learner ranks, and reserve them with Ray, so that every actor sees exactly its own."""

from __future__ import annotations

import asyncio
import re
import time
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Literal

import attrs

from rlsdk.cluster.nodes import cluster_use, staying_nodes
from rlsdk.config.schema import PlacementSection, RoleSection
from rlsdk.contracts import ApartRole
from rlsdk.errors import EnvironmentFault
from rlsdk.plurals import counted

RoleName = Literal["engine", "learner"]
ROLES: tuple[RoleName | ApartRole, ...] = ("engine", "learner", "critic", "reference")
"""Roles of actors that may have GPUs."""


@attrs.frozen
class GPUNode:
    """A node of the cluster.

    Attributes:
        name: Host name or address, for display.
        gpus: Number of GPUs that can be reserved.
        resources: Other Ray resources of the node, by name.
        id: Ray's id of the node; empty for a hypothetical node.
    """

    name: str
    gpus: int
    resources: Mapping[str, float] = {}
    id: str = ""


@attrs.frozen
class GPUPlace:
    """GPUs of one actor.

    Attributes:
        node: Index of the node.
        gpus: Indices of its GPUs on the node, ascending.
    """

    node: int
    gpus: tuple[int, ...]


@attrs.frozen
class GPUMap:
    """GPUs of all engines and ranks."""

    nodes: tuple[GPUNode, ...]
    engines: tuple[GPUPlace, ...] = ()
    learners: tuple[GPUPlace, ...] = ()
    apart: Mapping[ApartRole, tuple[GPUPlace, ...]] = {}

    def only(self, roles: Collection[RoleName | ApartRole]) -> GPUMap:
        """Return the map without the GPUs of other roles."""
        return attrs.evolve(
            self,
            engines=self.engines if "engine" in roles else (),
            learners=self.learners if "learner" in roles else (),
            apart={role: places for role, places in self.apart.items() if role in roles},
        )

    @property
    def counts(self) -> Counter[int]:
        """Number of assigned GPUs of each node, by its index."""
        places = [*self.engines, *self.learners, *(place for places in self.apart.values() for place in places)]
        return Counter(node for node, _ in {(place.node, gpu) for place in places for gpu in place.gpus})

    def users(self, node: int, gpu: int) -> list[str]:
        """Return the names of a GPU's actors, such as `engine 0` and `learner rank 0`."""
        roles = [("engine", self.engines), ("learner rank", self.learners)]
        roles += [(f"{role} rank", places) for role, places in self.apart.items()]
        return [
            f"{role} {rank}"
            for role, places in roles
            for rank, place in enumerate(places)
            if place.node == node and gpu in place.gpus
        ]

    def rows(self) -> Iterator[tuple[str, int, list[str]]]:
        """Yield node name, GPU index and users of every GPU."""
        for number, node in enumerate(self.nodes):
            for gpu in range(node.gpus):
                yield node.name, gpu, self.users(number, gpu)


@attrs.frozen
class _Demand:
    """Actors of one role: `count` blocks of `size` GPUs, each block on one node with enough of its resources."""

    role: RoleName | ApartRole
    count: int
    size: int
    resources: Mapping[str, float]

    def fits(self, free: Sequence[int], left: Mapping[str, float]) -> bool:
        """Return True if a node with these free GPUs and resources has room for a block."""
        return len(free) >= self.size and all(left.get(name, 0) >= amount for name, amount in self.resources.items())


class _NoRoomError(Exception):
    """Raised when no node has room for a demand."""

    def __init__(self, demand: _Demand) -> None:
        super().__init__(demand)
        self.demand = demand


def assign_gpus(
    placement: PlacementSection,
    nodes: Sequence[GPUNode],
    *,
    neighbours: int = 1,
    roles: Sequence[RoleName] = ("engine", "learner"),
    apart: Mapping[ApartRole, RoleSection] | None = None,
) -> GPUMap:
    """Assign GPUs to every engine and learner rank.

    Nodes and GPUs are filled in order. The GPUs of an engine are on one node, and so are ranks that share sequences.
    With `colocate`, the engine and learner rank of the same number share a GPU if the engine has one; otherwise
    no GPU is assigned twice. A model with separate ranks has separate GPUs.

    Args:
        placement: Counts, and the resources that select nodes.
        nodes: Nodes of the cluster.
        neighbours: Number of consecutive ranks that must be on one node (`learner.sequence_parallel`).
        roles: Roles to place; others get no GPUs.
        apart: Models with separate ranks.

    Raises:
        EnvironmentFault: There are too few GPUs, or their distribution over nodes does not fit.
    """
    engines = _Demand("engine", placement.engines, placement.gpus_per_engine, placement.engine_resources)
    of_block = {name: amount * neighbours for name, amount in placement.learner_resources.items()}
    ranks = _Demand("learner", -(-placement.learners // neighbours), neighbours, of_block)
    demands = [demand for demand in (ranks, engines) if demand.role in roles]
    alone = [_Demand(role, section.ranks, 1, section.resources) for role, section in (apart or {}).items()]
    try:
        if placement.colocate:
            found = {demand.role: _fill([demand], nodes)[demand.role] for demand in demands}
            taken = {(block.node, gpu) for blocks in found.values() for block in blocks for gpu in block.gpus}
            found |= _fill(alone, nodes, taken)
        else:
            # Large blocks first, since they are the hardest to fit on one node.
            found = _fill(sorted([*demands, *alone], key=lambda demand: -demand.size), nodes)
    except _NoRoomError as error:
        raise EnvironmentFault(_no_room(placement, demands, alone, error.demand, nodes)) from error
    learners = [GPUPlace(block.node, (gpu,)) for block in found.get("learner", ()) for gpu in block.gpus]
    return GPUMap(
        tuple(nodes),
        tuple(found.get("engine", ())),
        tuple(learners[: placement.learners]),
        {role: tuple(found[role]) for role in apart or {}},
    )


def _fill(
    demands: Sequence[_Demand], nodes: Sequence[GPUNode], taken: Collection[tuple[int, int]] = ()
) -> dict[RoleName | ApartRole, list[GPUPlace]]:
    """Place blocks on the first node with room, each on different free GPUs."""
    free = [[gpu for gpu in range(node.gpus) if (n, gpu) not in taken] for n, node in enumerate(nodes)]
    left = [dict(node.resources) for node in nodes]
    found: dict[RoleName | ApartRole, list[GPUPlace]] = {}
    for demand in demands:
        places = found.setdefault(demand.role, [])
        while len(places) < demand.count:
            node = next((n for n in range(len(nodes)) if demand.fits(free[n], left[n])), None)
            if node is None:
                raise _NoRoomError(demand)
            places.append(GPUPlace(node, tuple(free[node][: demand.size])))
            free[node] = free[node][demand.size :]
            for name, amount in demand.resources.items():
                left[node][name] -= amount
    return found


def _no_room(
    placement: PlacementSection,
    demands: Sequence[_Demand],
    alone: Sequence[_Demand],
    missing: _Demand,
    nodes: Sequence[GPUNode],
) -> str:
    """Return how many GPUs are needed and available and, if there are enough, which block fits on no node."""
    counts = {demand.role: demand.count * demand.size for demand in demands}
    needed = max(counts.values()) if placement.colocate else sum(counts.values())
    users = [f"{count} for {role}s" for role, count in sorted(counts.items())]
    if len(users) > 1:
        users.append("shared" if placement.colocate else "not shared")
    needed += sum(demand.count for demand in alone)
    users += [f"{demand.count} for the {demand.role}" for demand in alone]
    text = f"placement needs {counted(needed, 'GPU')} ({', '.join(users)}); "
    text += ", ".join(f"{node.name} has {node.gpus}" for node in nodes) or "no node has any"
    if sum(node.gpus for node in nodes) < needed:
        return text
    selected = f" and {', '.join(missing.resources)}" if missing.resources else ""
    what = {
        "engine": "an engine",
        "learner": "each group of learner ranks that share sequences",
    }.get(missing.role, f"a rank of the {missing.role}")
    return f"{text}; {what} needs {missing.size} free GPUs{selected} on one node, and no node has them left"


def parse_nodes(text: str) -> list[GPUNode]:
    """Read a description of nodes: `8x4` is four nodes with eight GPUs each, `8,4` one with eight and one with four.

    Raises:
        ValueError: The text is not such a description.
    """
    nodes: list[GPUNode] = []
    for part in text.split(","):
        read = re.fullmatch(r"([1-9][0-9]{0,3})(?:x([1-9][0-9]{0,3}))?", part.strip())
        if read is None:
            raise ValueError(f"expected GPUS or GPUSxNODES, such as 8, 8x4 or 8,4; got {part.strip()!r}")
        for _ in range(int(read[2] or 1)):
            nodes.append(GPUNode(f"node {len(nodes)}", int(read[1])))
    return nodes


RESERVE_SECONDS = 60.0
"""Seconds to wait for GPUs that another job of the cluster may hold."""
_RESERVED: list[Any] = []
"""Placement groups that this program has reserved, oldest first."""


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


def free_gpus(nodes: Sequence[GPUNode]) -> list[GPUNode]:
    """Return nodes of the running cluster with what nobody uses of their GPUs and resources."""
    from ray._private.state import available_resources_per_node

    free: Mapping[str, Mapping[str, float]] = available_resources_per_node()
    return [attrs.evolve(n, gpus=int(free.get(n.id, {}).get("GPU", 0)), resources=free.get(n.id, {})) for n in nodes]


@contextmanager
def gpus_released() -> Iterator[None]:
    """Context manager: release the GPUs that were reserved in the block.

    Ray itself releases them only when the program disconnects.
    """
    import ray
    from ray.util.placement_group import remove_placement_group

    before = len(_RESERVED)  # an evaluation may run while a trainer is open
    try:
        yield
    finally:
        mine = _RESERVED[before:]
        del _RESERVED[before:]
        for group in mine if ray.is_initialized() else ():
            remove_placement_group(group)


def reserve(
    found: GPUMap, placement: PlacementSection, apart: Mapping[ApartRole, RoleSection] | None = None
) -> Reservation:
    """Reserve the GPUs of a map in one placement group per node, until `gpus_released` or the end of the program.

    Args:
        found: GPUs of each actor.
        placement: Custom resources that engines and ranks reserve as well.
        apart: Custom resources of models with dedicated ranks.

    Raises:
        EnvironmentFault: The GPUs are in use.
    """
    import ray

    bundles = _bundles(found, placement, apart or {})
    groups = {node: _group(found.nodes[node], [*of_node.values()]) for node, of_node in bundles.items()}
    asked = {node: [_ask(groups[node], number) for number in range(len(of_node))] for node, of_node in bundles.items()}
    devices = {node: [device for _, device in ray.get(answers)] for node, answers in asked.items()}

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
    from ray.util.placement_group import placement_group, placement_group_table, remove_placement_group

    # The node is a preference: were it a condition, Ray could not move the group after the node is lost. A node whose
    # GPUs the last run is still releasing loses the group to another one, which may be meant for a later group.
    deadline = time.monotonic() + RESERVE_SECONDS
    while time.monotonic() < deadline:
        group = placement_group(
            [dict(bundle) for bundle in bundles], strategy="STRICT_PACK", _soft_target_node_id=node.id
        )
        ready = group.wait(max(deadline - time.monotonic(), 0.0))
        if ready and set(placement_group_table(group)["bundles_to_node_id"].values()) == {node.id}:
            _RESERVED.append(group)
            return group
        remove_placement_group(group)
        time.sleep(0.1)
    total: dict[str, float] = {}
    for bundle in bundles:
        for name, amount in bundle.items():
            total[name] = total.get(name, 0.0) + amount
    wanted = ", ".join(f"{amount:g} {name}" for name, amount in total.items())
    use = "; ".join(filter(None, ("`ray status` shows what is used", cluster_use())))
    raise EnvironmentFault(
        f"Ray could not reserve {wanted} on {node.name} within {RESERVE_SECONDS:g} s: another job of the cluster "
        f"holds them ({use}). Wait for it, or lower placement.engines or "
        "placement.learners"
    )


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
