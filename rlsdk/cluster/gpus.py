"""Assign GPUs to engines and learner ranks."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Literal

import attrs

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
    """GPUs of all engines and ranks.

    Attributes:
        nodes: Nodes of the cluster.
        engines: Place of each engine, by rank.
        learners: Place of each learner rank.
        apart: Places of ranks of models with separate processes.
    """

    nodes: tuple[GPUNode, ...]
    engines: tuple[GPUPlace, ...] = ()
    learners: tuple[GPUPlace, ...] = ()
    apart: Mapping[ApartRole, tuple[GPUPlace, ...]] = {}

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
