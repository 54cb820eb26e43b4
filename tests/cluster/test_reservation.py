"""The GPUs that actors really see, on clusters with made-up GPUs: no GPU is needed to place something on it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import pytest

from rlsdk.cluster.actors import RunActor, kill, spawn
from rlsdk.cluster.gpus import assign_gpus
from rlsdk.cluster.reservation import Seat, gpu_nodes, reserve
from rlsdk.config.schema import PlacementSection
from rlsdk.errors import EnvironmentFault

pytestmark = [pytest.mark.stack, pytest.mark.slow]
Where = tuple[str, str]


class Looking(RunActor):
    """An actor that tells its node and the GPUs it sees."""

    def look(self) -> Where:
        import ray

        return ray.get_runtime_context().get_node_id(), os.environ.get("CUDA_VISIBLE_DEVICES", "all")


@pytest.fixture(scope="module")
def two_nodes() -> Iterator[Any]:
    """A cluster of two nodes, with four GPUs and with two."""
    import ray
    from ray.cluster_utils import Cluster

    before = dict(os.environ)
    os.environ["RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO"] = "0"
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 16, "num_gpus": 4})
    cluster.add_node(num_cpus=16, num_gpus=2)
    cluster.wait_for_nodes()
    ray.init(address=cluster.address, log_to_driver=False)
    yield cluster
    ray.shutdown()
    cluster.shutdown()
    os.environ.clear()
    os.environ.update(before)


def seen(seats: tuple[Seat, ...]) -> list[Where]:
    """What actors on these seats see, all alive at once."""
    import ray

    actors = [spawn(Looking, cpus=1, seat=seat) for seat in seats]
    found: list[Where] = ray.get([actor.look.remote() for actor in actors])
    for actor in actors:
        kill(actor)
    return found


def on(section: PlacementSection) -> tuple[list[Where], list[Where]]:
    """What engines and ranks of a placement see; the GPUs are free again afterwards."""
    from ray.util.placement_group import remove_placement_group

    reserved = reserve(assign_gpus(section, gpu_nodes()), section)
    every = reserved.engines + reserved.learners
    found = seen(every)
    for group in {id(seat.group): seat.group for seat in every}.values():
        remove_placement_group(group)
    return found[: len(reserved.engines)], found[len(reserved.engines) :]


@pytest.mark.usefixtures("two_nodes")
def test_colocated_pairs_see_the_same_gpu_and_no_two_pairs_share_one() -> None:
    engines, learners = on(PlacementSection(engines=6, learners=6))
    assert engines == learners
    assert len(set(engines)) == 6
    assert {device for _, device in engines} <= {"0", "1", "2", "3"}


@pytest.mark.usefixtures("two_nodes")
def test_an_engine_of_several_gpus_sees_all_of_them() -> None:
    engines, learners = on(PlacementSection(engines=3, gpus_per_engine=2, learners=6))
    spanned = [{(node, device) for device in devices.split(",")} for node, devices in engines]
    assert [len(each) for each in spanned] == [2, 2, 2]
    assert set.union(*spanned) == set(learners)
    assert [spanned[rank // 2] >= {where} for rank, where in enumerate(learners)] == [True] * 6


@pytest.mark.usefixtures("two_nodes")
def test_apart_no_gpu_is_shared() -> None:
    engines, learners = on(PlacementSection(engines=2, gpus_per_engine=2, learners=2, colocate=False))
    of_engines = {(node, device) for node, devices in engines for device in devices.split(",")}
    assert (len(of_engines), len(set(learners))) == (4, 2)
    assert not of_engines & set(learners)
    assert len({node for node, _ in learners}) == 1


@pytest.mark.usefixtures("two_nodes")
def test_gpus_of_another_job_are_said(monkeypatch: pytest.MonkeyPatch) -> None:
    import ray

    monkeypatch.setattr("rlsdk.cluster.reservation.RESERVE_SECONDS", 2.0)
    others = [ray.remote(Looking).options(num_gpus=2).remote() for _ in range(3)]
    ray.get([other.look.remote() for other in others])
    section = PlacementSection(engines=1)
    with pytest.raises(EnvironmentFault, match=r"could not reserve 1 GPU, 2 CPU on .*`ray status` shows"):
        reserve(assign_gpus(section, gpu_nodes()), section)
    for other in others:
        ray.kill(other)
