"""GPU assignment to actors, without a cluster."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import attrs
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlsdk.cluster.gpus import GPUMap, GPUNode, assign_gpus, parse_nodes
from rlsdk.config.schema import PlacementSection, RoleSection
from rlsdk.errors import EnvironmentFault


def placed(nodes: str, neighbours: int = 1, **placement: object) -> GPUMap:
    section = PlacementSection(**placement)  # type: ignore[arg-type]
    return assign_gpus(section, parse_nodes(nodes), neighbours=neighbours)


def where(found: GPUMap) -> tuple[list[tuple[int, ...]], list[tuple[int, ...]]]:
    """(node, GPU, …) of each engine and of each rank."""
    return [(p.node, *p.gpus) for p in found.engines], [(p.node, *p.gpus) for p in found.learners]


def test_colocated_engine_and_rank_of_one_number_share_a_gpu() -> None:
    engines, learners = where(placed("2", engines=2, learners=2))
    assert engines == learners == [(0, 0), (0, 1)]
    engines, learners = where(placed("2x2", engines=4, learners=4))
    assert engines == learners == [(0, 0), (0, 1), (1, 0), (1, 1)]


def test_colocated_engines_of_several_gpus_span_those_of_the_ranks() -> None:
    engines, learners = where(placed("4", engines=2, gpus_per_engine=2, learners=4))
    assert engines == [(0, 0, 1), (0, 2, 3)]
    assert learners == [(0, 0), (0, 1), (0, 2), (0, 3)]
    assert where(placed("3", engines=1, gpus_per_engine=3, learners=1))[0] == [(0, 0, 1, 2)]


def test_apart_no_gpu_is_given_twice_and_large_blocks_come_first() -> None:
    engines, learners = where(placed("4,2", engines=1, gpus_per_engine=4, learners=2, colocate=False))
    assert (engines, learners) == ([(0, 0, 1, 2, 3)], [(1, 0), (1, 1)])
    engines, learners = where(placed("4", engines=2, learners=2, colocate=False))
    assert (learners, engines) == ([(0, 0), (0, 1)], [(0, 2), (0, 3)])


def test_ranks_that_share_sequences_are_on_one_node() -> None:
    _, learners = where(placed("3,3", engines=1, learners=4, neighbours=2))
    assert learners == [(0, 0), (0, 1), (1, 0), (1, 1)]


def test_custom_resources_select_the_nodes_of_a_role() -> None:
    nodes = [GPUNode("a", 2, {"big": 1.0}), GPUNode("b", 4, {"fast": 2.0})]
    section = PlacementSection(
        engines=2, learners=2, colocate=False, engine_resources={"fast": 1.0}, learner_resources={"big": 0.5}
    )
    assert where(assign_gpus(section, nodes)) == ([(1, 0), (1, 1)], [(0, 0), (0, 1)])
    with pytest.raises(EnvironmentFault, match="1 free GPUs and fast on one node"):  # b has units for two
        assign_gpus(attrs.evolve(section, engines=3), nodes)


@pytest.mark.parametrize(
    ("nodes", "placement", "said"),
    [
        (
            "3",
            {"engines": 2, "learners": 2, "colocate": False},
            "placement needs 4 GPUs (2 for engines, 2 for learners, not shared); node 0 has 3",
        ),
        (
            "2,2",
            {"engines": 1, "gpus_per_engine": 3},
            "(3 for engines, 1 for learners, shared); node 0 has 2, node 1 has 2; an engine needs 3 free GPUs "
            "on one node, and no node has them left",
        ),
        ("1", {"engines": 1, "learners": 2}, "needs 2 GPUs (1 for engines, 2 for learners, shared); node 0 has 1"),
        ("4", {"engines": 1, "engine_resources": {"fast": 1.0}}, "an engine needs 1 free GPUs and fast on one node"),
    ],
)
def test_placements_without_room_are_refused(nodes: str, placement: dict[str, object], said: str) -> None:
    with pytest.raises(EnvironmentFault) as raised:
        placed(nodes, **placement)
    assert said in str(raised.value)


@given(
    gpus=st.lists(st.integers(1, 8), min_size=1, max_size=4),
    engines=st.integers(1, 6),
    width=st.integers(1, 4),
    learners=st.integers(1, 8),
    colocate=st.booleans(),
)
def test_every_map_gives_each_role_its_own_gpus(
    gpus: list[int], engines: int, width: int, learners: int, colocate: bool
) -> None:
    nodes = [GPUNode(f"node {n}", count) for n, count in enumerate(gpus)]
    section = PlacementSection(engines=engines, gpus_per_engine=width, learners=learners, colocate=colocate)
    try:
        found = assign_gpus(section, nodes)
    except EnvironmentFault:
        needed = max(engines * width, learners) if colocate else engines * width + learners
        blocks = sum(count // width for count in gpus)
        assert needed > sum(gpus) or blocks < engines or not colocate
        return
    assert (len(found.engines), len(found.learners)) == (engines, learners)
    assert all(len(place.gpus) == width and max(place.gpus) < gpus[place.node] for place in found.engines)
    of_engines = Counter((p.node, gpu) for p in found.engines for gpu in p.gpus)
    of_ranks = Counter((p.node, gpu) for p in found.learners for gpu in p.gpus)
    assert max(of_engines.values()) == max(of_ranks.values()) == 1
    assert colocate or not of_engines & of_ranks
    assert [p.node for p in found.learners] == sorted(p.node for p in found.learners)
    named = Counter(user for _, _, users in found.rows() for user in users)
    assert named == {f"engine {n}": width for n in range(engines)} | {f"learner rank {n}": 1 for n in range(learners)}


def test_nodes_are_read_from_a_text() -> None:
    assert [node.gpus for node in parse_nodes("8x2,4")] == [8, 8, 4]
    for wrong in ("", "x2", "8x", "0", "8x0", "eight", "-1"):
        with pytest.raises(ValueError, match="expected GPUS or GPUSxNODES"):
            parse_nodes(wrong)


@pytest.mark.parametrize("colocate", [True, False])
def test_models_with_separate_ranks_share_no_gpu(colocate: bool) -> None:
    apart = {"critic": RoleSection(ranks=2), "reference": RoleSection(ranks=1)}
    section = PlacementSection(engines=2, learners=2, colocate=colocate)
    found = assign_gpus(section, parse_nodes("4x2"), apart=apart)  # type: ignore[arg-type]
    users = [each for _, _, each in found.rows()]
    others = [each for each in users if any(name.startswith(("critic", "reference")) for name in each)]
    assert sorted(name for each in others for name in each) == ["critic rank 0", "critic rank 1", "reference rank 0"]
    assert all(len(each) == 1 for each in others)


def test_a_model_with_its_own_ranks_but_no_gpu_is_named() -> None:
    with pytest.raises(EnvironmentFault) as raised:
        assign_gpus(PlacementSection(), parse_nodes("2"), apart={"critic": RoleSection(ranks=2)})
    said = "placement needs 3 GPUs (1 for engines, 1 for learners, shared, 2 for the critic); node 0 has 2"
    assert str(raised.value) == said


pytestmark = [pytest.mark.stack, pytest.mark.slow]


@pytest.fixture(scope="module")
def seen() -> dict[str, Any]:
    """(node, GPUs) of each engine and rank, by case."""
    command = [sys.executable, str(Path(__file__).with_name("reserving.py"))]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert ran.returncode == 0, ran.stderr[-3000:]
    found: dict[str, Any] = json.loads(ran.stdout.strip().splitlines()[-1])
    return found


def each(places: Any) -> list[tuple[str, str]]:
    """(node, GPU) of all actors of a role."""
    return [(node, gpu) for node, gpus in places for gpu in gpus]


def test_colocated_pairs_see_the_same_gpu_and_no_two_pairs_share_one(seen: dict[str, Any]) -> None:
    engines, learners = seen["pairs"]["engines"], seen["pairs"]["learners"]
    assert engines == learners
    assert len(set(each(engines))) == len(each(engines)) == 6
    assert {gpu for _, gpu in each(engines)} == {"0", "1", "2", "3"}


def test_an_engine_of_several_gpus_sees_those_of_as_many_ranks(seen: dict[str, Any]) -> None:
    engines, learners = seen["wide"]["engines"], seen["wide"]["learners"]
    assert [len(gpus) for _, gpus in engines] == [2, 2, 2]
    assert each(engines) == each(learners)
    assert len(set(each(learners))) == 6


def test_apart_no_gpu_is_shared(seen: dict[str, Any]) -> None:
    engines, learners = each(seen["apart"]["engines"]), each(seen["apart"]["learners"])
    assert (len(set(engines)), len(set(learners))) == (4, 2)
    assert not set(engines) & set(learners)
    assert len({node for node, _ in learners}) == 1


def test_the_two_programs_of_a_run_reserve_different_gpus(seen: dict[str, Any]) -> None:
    engines, learners = each(seen["programs"]["engines"]), each(seen["programs"]["learners"])
    assert (len(set(engines)), len(set(learners))) == (4, 2)
    assert not set(engines) & set(learners)


def test_a_new_explorer_takes_free_gpus_if_the_trainer_holds_those_of_its_map(seen: dict[str, Any]) -> None:
    named, nodes = seen["replaced"]
    assert len(nodes) == 2 and named not in nodes


def test_an_export_reserves_gpus_of_the_policys_ranks_alone(seen: dict[str, Any]) -> None:
    assert seen["exporting"] == 6 - 2


def test_gpus_that_another_job_is_releasing_are_awaited_though_a_larger_node_has_some(seen: dict[str, Any]) -> None:
    reserved, wanted = seen["awaited"]
    assert reserved == wanted


def test_a_program_that_stays_connected_to_ray_holds_no_gpus_after_a_run(seen: dict[str, Any]) -> None:
    assert seen["released"] == 6


def test_gpus_of_another_job_are_reported(seen: dict[str, Any]) -> None:
    assert seen["refused"].startswith("Ray could not reserve 1 GPU, 2 CPU on ")
    assert "`ray status` shows what is used; free are " in seen["refused"]
    assert " of 32 CPU, 0 of 6 GPU; other programs on the cluster: none)" in seen["refused"]
