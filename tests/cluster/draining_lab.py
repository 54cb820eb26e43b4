"""Drain nodes of a cluster on this machine, in a separate program, since tests of one process share a Ray.

python tests/cluster/draining_lab.py found|moved
"""

from __future__ import annotations

import asyncio
import os
import sys
import tempfile
import time
from typing import Any

from rlsdk.cluster.actors import RunActor, spawn
from rlsdk.cluster.gpus import assign_gpus, gpu_nodes, present_seat, reserve
from rlsdk.cluster.nodes import draining_nodes, on_draining, staying_nodes
from rlsdk.config.schema import PlacementSection


def drained_nodes_are_found(cluster: Any, first: Any, second: Any) -> None:
    """They are found with their deadlines, and get nothing new."""
    import ray

    actors = {node.node_id: spawn(RunActor, node=node.node_id) for node in (first, second)}
    ray.get([actor.identity.remote() for actor in actors.values()])
    assert draining_nodes() == [] and len(staying_nodes()) == 3
    deadline = time.time() + 600
    drain(cluster, first.node_id, deadline)
    [found] = draining_nodes()
    assert found.id == first.node_id and first.node_id[:8] in found.name
    assert found.deadline is not None and abs(found.deadline - deadline) < 1
    assert first.node_id not in {node["NodeID"] for node in staying_nodes()}
    assert [node.id for node in gpu_nodes()] == [second.node_id]  # where a run that is resumed now reserves
    assert asyncio.run(on_draining([found], actors)) == {first.node_id: found}
    drain(cluster, second.node_id, 0)
    assert {node.id: node.deadline for node in draining_nodes()}[second.node_id] is None


def an_engine_moves(cluster: Any, first: Any, second: Any) -> None:
    """It gets the GPU that Ray reserves elsewhere, once its node is gone."""
    import ray

    other = spawn(RunActor, gpus=1, node=second.node_id)
    ray.get(other.identity.remote())  # it has GPU 0 of the second node
    section, leaves = PlacementSection(engines=1), [node for node in gpu_nodes() if node.id == first.node_id]
    [seat] = reserve(assign_gpus(section, leaves, roles=["engine"]), section).engines
    assert (seat.node, seat.devices) == (first.node_id, ("0",))
    drain(cluster, first.node_id, time.time() + 600)
    try:
        asyncio.run(asyncio.wait_for(present_seat(seat), 3))
    except TimeoutError:
        cluster.remove_node(first)
    else:
        raise AssertionError("the seat moved before its node was gone")
    moved = asyncio.run(asyncio.wait_for(present_seat(seat), 60))
    assert (moved.node, moved.devices) == (second.node_id, ("1",))


def drain(cluster: Any, node: str, deadline: float) -> None:
    """Ask Ray to drain a node until a deadline, as after a spot instance's notice; 0 for no deadline."""
    from ray._raylet import GcsClient
    from ray.core.generated.autoscaler_pb2 import DrainNodeReason

    reason = DrainNodeReason.Value("DRAIN_NODE_REASON_PREEMPTION")
    accepted, refusal = GcsClient(address=cluster.address).drain_node(node, reason, "spot notice", int(deadline * 1000))
    assert accepted, refusal


def main() -> None:
    """Try a case on a cluster with two nodes, of one and two made-up GPUs."""
    import ray
    from ray.cluster_utils import Cluster

    case = {"found": drained_nodes_are_found, "moved": an_engine_moves}[sys.argv[1]]
    with tempfile.TemporaryDirectory(prefix="ray-", dir="/tmp", ignore_cleanup_errors=True) as folder:
        os.environ |= {"RAY_TMPDIR": folder, "RAY_USAGE_STATS_ENABLED": "0"}
        os.environ.setdefault("RAY_AUTH_MODE", "disabled")
        cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
        try:
            nodes = [cluster.add_node(num_cpus=1, num_gpus=gpus) for gpus in (1, 2)]
            ray.init(address=cluster.address, log_to_driver=False, configure_logging=False)
            case(cluster, *nodes)
        finally:
            ray.shutdown()
            cluster.shutdown()


if __name__ == "__main__":
    main()
