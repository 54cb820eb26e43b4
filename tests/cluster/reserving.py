"""Reserve fake GPUs on a cluster of two nodes, and print the GPUs of each actor; run by `test_gpus.py`.

A program of its own: the cluster must be neither found nor joined by other tests, and Ray connects a process once.
"""

from __future__ import annotations

import json
import os
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

from rlsdk.cluster import gpus
from rlsdk.cluster.actors import RunActor, kill, spawn
from rlsdk.cluster.gpus import GPUSeat, assign_gpus, gpu_nodes, reserve
from rlsdk.cluster.placement import gpu_map, layout, ray_cluster, sections_apart
from rlsdk.config import Plan, check
from rlsdk.config.schema import PlacementSection
from rlsdk.errors import EnvironmentFault

MODEL = Path(__file__).parents[2] / "examples" / "models" / "countdown-nano"
CASES = {
    "pairs": PlacementSection(engines=6, learners=6),
    "wide": PlacementSection(engines=3, gpus_per_engine=2, learners=6),
    "apart": PlacementSection(engines=2, gpus_per_engine=2, learners=2, colocate=False),
}


class Looking(RunActor):
    """An actor that tells its node and the GPUs it sees."""

    def look(self) -> tuple[str, list[str]]:
        import ray

        return ray.get_runtime_context().get_node_id(), os.environ.get("CUDA_VISIBLE_DEVICES", "all").split(",")


def seen(seats: tuple[GPUSeat, ...]) -> list[Any]:
    """GPUs that actors on these seats see, all alive at once."""
    import ray

    actors = [spawn(Looking, cpus=1, seat=seat) for seat in seats]
    found = ray.get([actor.look.remote() for actor in actors])
    for actor in actors:
        kill(actor)
    return list(found)


def on(section: PlacementSection) -> dict[str, list[Any]]:
    """GPUs that engines and ranks of a placement see; they are free again afterwards."""
    from ray.util.placement_group import remove_placement_group

    reserved = reserve(assign_gpus(section, gpu_nodes()), section)
    every = reserved.engines + reserved.learners
    found = seen(every)
    for group in {id(seat.group): seat.group for seat in every}.values():
        remove_placement_group(group)
    return {"engines": found[: len(reserved.engines)], "learners": found[len(reserved.engines) :]}


def awaited() -> list[str]:
    """Node of an engine, and the one that it was to be on, whose GPUs another job releases a second later."""
    import ray
    from ray.util.placement_group import remove_placement_group
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    small = min(gpu_nodes(), key=lambda node: node.gpus)
    there = NodeAffinitySchedulingStrategy(small.id, soft=False)
    other = ray.remote(Looking).options(num_gpus=2, scheduling_strategy=there).remote()
    ray.get(other.look.remote())
    threading.Timer(1.0, kill, [other]).start()
    section = PlacementSection(engines=1, gpus_per_engine=2)
    (seat,) = reserve(assign_gpus(section, [small]), section).engines
    remove_placement_group(seat.group)
    return [seat.node, small.id]


def planned(**settings: Any) -> Plan:
    """Check a configuration of the nano model."""
    own = {"name": "run", "model": {"path": str(MODEL)}, "tasks": {"train": "countdown"}, "reward": "countdown"}
    return check({**own, "steps": 1, **settings})


def programs() -> dict[str, list[Any]]:
    """GPUs that the two programs of a run reserve, one after the other."""
    from ray.util.placement_group import remove_placement_group

    plan = planned(placement={"engines": 4, "learners": 2, "colocate": False})
    explorer = layout(plan, 16, 6, roles=["engine"], apart=True)
    trainer = layout(plan, 16, 6, roles=["learner"], apart=True)
    assert not (explorer.learners or trainer.engines)
    for group in {id(seat.group): seat.group for seat in explorer.engines + trainer.learners}.values():
        remove_placement_group(group)
    seats = {"engines": explorer.engines, "learners": trainer.learners}
    return {role: [(seat.node, seat.devices) for seat in found] for role, found in seats.items()}


def replaced() -> list[Any]:
    """Node that an explorer's map names, which the trainer has in use, and the nodes that the explorer gets."""
    import ray
    from ray.util.placement_group import remove_placement_group
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    plan = planned(placement={"engines": 2, "learners": 2, "colocate": False})
    found = gpu_map(plan, gpu_nodes())
    named = found.nodes[found.engines[0].node]
    there = NodeAffinitySchedulingStrategy(named.id, soft=False)
    trainer = ray.remote(Looking).options(num_gpus=named.gpus, scheduling_strategy=there).remote()
    ray.get(trainer.look.remote())
    while ray.available_resources().get("GPU", 0.0) > 6 - named.gpus:
        time.sleep(0.1)
    explorer = layout(plan, 16, 6, roles=["engine"], apart=True)
    kill(trainer)
    for group in {id(seat.group): seat.group for seat in explorer.engines}.values():
        remove_placement_group(group)
    return [named.id, [seat.node for seat in explorer.engines]]


def exporting() -> float:
    """How many GPUs are free while a model is exported, in whose training a critic and a reference had GPUs, too."""
    import ray
    from ray.util.placement_group import remove_placement_group

    apart = {"critic": {"ranks": 2}, "reference": {"ranks": 3}}
    plan = planned(algorithm={"use": "ppo", "kl": "k3", "kl_coef": 0.01}, placement={"learners": 2}, **apart)
    assert {role: section.ranks for role, section in sections_apart(plan).items()} == {"critic": 2, "reference": 3}
    found = layout(plan, 16, 6, roles=["learner"])
    free = ray.available_resources().get("GPU", 0.0)
    for group in {id(seat.group): seat.group for seat in found.learners}.values():
        remove_placement_group(group)
    return float(free)


def released() -> float:
    """How many GPUs are free after two runs of this program, whose own connection to Ray stays open."""
    import ray

    plan = planned(placement={"engines": 4, "learners": 4})
    for _ in range(2):  # the second one would find too few, had the first one kept its own
        with ray_cluster(plan) as count:
            layout(plan, 16, count)
    end = time.monotonic() + 30  # Ray counts what is free with a delay
    while (free := ray.available_resources().get("GPU", 0.0)) < count and time.monotonic() < end:
        time.sleep(0.1)
    return float(free)


def refused() -> str:
    """Error if another job holds all GPUs."""
    import ray

    section = PlacementSection(engines=1)
    earlier = reserve(assign_gpus(section, gpu_nodes()), section)
    others = [ray.remote(Looking).options(num_gpus=count).remote() for count in (2, 2, 1)]
    ray.get([other.look.remote() for other in others])
    gpus.RESERVE_SECONDS = 2.0
    assert len(earlier.engines) == 1
    try:
        reserve(assign_gpus(section, gpu_nodes()), section)
    except EnvironmentFault as fault:
        return str(fault)
    return ""


def main() -> None:
    """Try all cases on one cluster, with four GPUs on one node and two on the other."""
    import ray
    from ray.cluster_utils import Cluster

    with tempfile.TemporaryDirectory(prefix="ray-", dir="/tmp", ignore_cleanup_errors=True) as folder:
        os.environ |= {"RAY_TMPDIR": folder, "RAY_USAGE_STATS_ENABLED": "0", "RAY_worker_niceness": "0"}
        # A program that finds a token in the home folder would refuse the calls of a cluster that was started without.
        os.environ.setdefault("RAY_AUTH_MODE", "disabled")
        node = {"num_cpus": 16, "include_dashboard": False}
        cluster = Cluster(initialize_head=True, head_node_args={**node, "num_gpus": 4})
        cluster.add_node(num_cpus=16, num_gpus=2)
        cluster.wait_for_nodes()
        ray.init(address=cluster.address, log_to_driver=False)
        try:
            cases: dict[str, Any] = {name: on(section) for name, section in CASES.items()}
            cases |= {"awaited": awaited(), "exporting": exporting(), "programs": programs()}
            cases |= {"replaced": replaced(), "released": released(), "refused": refused()}
            print(json.dumps(cases))
        finally:
            ray.shutdown()
            cluster.shutdown()


if __name__ == "__main__":
    main()
