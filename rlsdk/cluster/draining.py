"""Nodes that are about to leave a Ray cluster, and which actors are on them.

A node is drained by Ray's autoscaler (also KubeRay's), by `ray drain-node` after the notice of a spot instance, and by
SIGTERM to `ray start --block`. Ray then places nothing on it any more, and leaves what runs there alone until somebody
ends the node. Ray 2.60 has no public call that tells which nodes are drained: its own Train and Serve ask the GCS as
this module does. The reason that was given with the request is shown only after the node is gone.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, TypeVar

import attrs

log = logging.getLogger(__name__)
T = TypeVar("T")
EVERY_SECONDS = 3.0
"""Seconds between two questions to Ray's GCS; an answer takes half a millisecond."""
HAND_BACK_SECONDS = 5.0
"""Seconds before a node's deadline in which unfinished work is handed back."""
ANSWER_SECONDS = 5.0
"""Seconds in which the GCS, or an actor that is asked where it is, must answer; it is asked again later."""


@attrs.frozen
class DrainingNode:
    """A node that is to leave the cluster.

    Attributes:
        id: Ray's id of the node.
        name: Address and host name.
        deadline: Time (`time.time`) at which it may be gone; None if nobody said when.
    """

    id: str
    name: str
    deadline: float | None = None

    def __str__(self) -> str:
        when = "" if self.deadline is None else f" in {max(0.0, self.deadline - time.time()):.0f} s"
        return f"{self.name}, which leaves the cluster{when} (Ray drains it)"

    @property
    def seconds_to_finish(self) -> float | None:
        """Seconds for work on the node to finish before it has to be handed back; None if there is no deadline."""
        return None if self.deadline is None else max(0.0, self.deadline - HAND_BACK_SECONDS - time.time())


def draining_nodes() -> list[DrainingNode]:
    """Ask Ray which nodes of the cluster are to leave it.

    Raises:
        RayError: The GCS does not answer.
    """
    import ray
    from ray._raylet import GcsClient  # type: ignore[attr-defined]

    # `ray._private.state` would answer as well, but ends this process if the GCS is gone for a minute.
    client = GcsClient(address=ray.get_runtime_context().gcs_address)
    deadlines: Mapping[str, int] = client.get_draining_nodes(timeout=ANSWER_SECONDS)  # in ms; 0: no deadline
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


async def on_draining(nodes: Sequence[DrainingNode], actors: Mapping[T, Any]) -> dict[T, DrainingNode]:
    """Return which of some actors are on draining nodes; one that does not answer in time is left out.

    Args:
        nodes: Draining nodes.
        actors: Handles of `RunActor`s, by whatever names them.
    """
    by_id = {node.id: node for node in nodes}
    asked = {asyncio.ensure_future(_node_of(actor)): name for name, actor in actors.items()}
    if not asked:
        return {}
    done, late = await asyncio.wait(asked, timeout=ANSWER_SECONDS)
    for each in late:
        each.cancel()
    return {asked[each]: by_id[each.result()] for each in done if each.result() in by_id}


async def _node_of(actor: Any) -> str:
    """Return the id of an actor's node; empty if the actor is dead, which whoever calls it will notice."""
    from ray.exceptions import RayError

    try:
        return str((await actor.identity.remote()).node)
    except RayError:
        return ""


async def watch_nodes(told: Callable[[Sequence[DrainingNode]], Awaitable[None]]) -> None:
    """Call a function every few seconds with the draining nodes, while there are any; runs until it is cancelled."""
    import ray

    while ray.is_initialized():
        try:
            if nodes := await asyncio.to_thread(draining_nodes):
                await told(nodes)
        except ray.exceptions.RpcError as error:  # whether Ray is lost is for the watchdog to say
            log.debug("Ray does not say which nodes are drained: %s", error)
        except Exception:  # without this watch a run continues as if nodes went away unannounced
            log.exception("nodes that are to leave the cluster could not be left, which is tried again")
        await asyncio.sleep(EVERY_SECONDS)
