"""Nodes that Ray drains: who they are, until when, and that nothing is placed there; all of them on this machine."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Iterator
from typing import Any

import pytest

from rlsdk.cluster.actors import RunActor, spawn
from rlsdk.cluster.draining import DrainingNode, draining_nodes, on_draining, staying_nodes
from rlsdk.cluster.gpus import assign_gpus
from rlsdk.cluster.reservation import gpu_nodes, present_seat, reserve
from rlsdk.config.schema import PlacementSection


def test_work_is_handed_back_before_the_deadline_and_never_if_there_is_none() -> None:
    soon, late = (DrainingNode("a", "here", time.time() + seconds) for seconds in (2, 100))
    assert soon.seconds_to_finish == 0
    assert 94 < (late.seconds_to_finish or 0) <= 95
    assert DrainingNode("a", "here").seconds_to_finish is None


def test_a_message_says_when_the_node_goes_if_that_is_known() -> None:
    assert str(DrainingNode("a", "10.0.0.12 (w, node 5b3c61aa)", time.time() + 90.4)) == (
        "10.0.0.12 (w, node 5b3c61aa), which leaves the cluster in 90 s (Ray drains it)"
    )
    assert str(DrainingNode("a", "here")) == "here, which leaves the cluster (Ray drains it)"


@pytest.fixture
def nodes(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Any, list[Any]]]:
    """A cluster that this process is connected to, and two nodes of it, with one and two made-up GPUs."""
    import ray
    from ray.cluster_utils import Cluster

    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    monkeypatch.setenv("RAY_AUTH_MODE", os.environ.get("RAY_AUTH_MODE", "disabled"))
    ray.shutdown()
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
    try:
        added = [cluster.add_node(num_cpus=1, num_gpus=gpus) for gpus in (1, 2)]
        ray.init(address=cluster.address, log_to_driver=False, configure_logging=False)
        yield cluster, added
    finally:
        ray.shutdown()
        cluster.shutdown()


@pytest.mark.stack
def test_drained_nodes_are_found_with_their_deadline_and_get_nothing_new(nodes: Any) -> None:
    import ray

    cluster, (first, second) = nodes
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


@pytest.mark.slow
@pytest.mark.stack
def test_an_engine_that_moves_gets_the_gpu_that_ray_reserves_elsewhere_once_its_node_is_gone(nodes: Any) -> None:
    import ray

    cluster, (first, second) = nodes
    other = spawn(RunActor, gpus=1, node=second.node_id)
    ray.get(other.identity.remote())  # it has GPU 0 of the second node
    section, leaves = PlacementSection(engines=1), [node for node in gpu_nodes() if node.id == first.node_id]
    [seat] = reserve(assign_gpus(section, leaves, roles=["engine"]), section).engines
    assert (seat.node, seat.devices) == (first.node_id, ("0",))
    drain(cluster, first.node_id, time.time() + 600)
    with pytest.raises(TimeoutError):
        asyncio.run(asyncio.wait_for(present_seat(seat), 3))
    cluster.remove_node(first)
    moved = asyncio.run(asyncio.wait_for(present_seat(seat), 60))
    assert (moved.node, moved.devices) == (second.node_id, ("1",))


def drain(cluster: Any, node: str, deadline: float) -> None:
    """Ask Ray to drain a node until a time, as after the notice of a spot instance; 0: nobody says until when."""
    from ray._raylet import GcsClient
    from ray.core.generated.autoscaler_pb2 import DrainNodeReason

    reason = DrainNodeReason.Value("DRAIN_NODE_REASON_PREEMPTION")
    accepted, refusal = GcsClient(address=cluster.address).drain_node(node, reason, "spot notice", int(deadline * 1000))
    assert accepted, refusal
