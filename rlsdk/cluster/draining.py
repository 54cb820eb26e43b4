"""Find nodes that are about to leave a Ray cluster, and the actors on them.

Nodes are drained by Ray's autoscaler (also KubeRay's), by `ray drain-node` after a spot-instance notice, and by SIGTERM
to `ray start --block`. Ray then places nothing new on the node, but leaves running actors alone until the node ends.
Ray 2.60 has no public call that lists draining nodes; like Ray Train and Serve, this module asks the GCS. Ray shows the
reason for a drain only after the node has gone.
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
"""Polling interval of Ray's GCS in seconds; a query takes half a millisecond."""
HAND_BACK_SECONDS = 5.0
"""Seconds before a node's deadline at which unfinished work is handed back."""
ANSWER_SECONDS = 5.0
"""Timeout in seconds for answers of the GCS or of an actor; the query is repeated later."""


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
    """Return the actors on draining nodes; actors that do not answer in time are left out.

    Args:
        nodes: Draining nodes.
        actors: Handles of `RunActor`s, by any key.
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
