"""The GPUs that actors see on a cluster with fake GPUs, which needs no real GPU."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

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


def test_an_export_reserves_gpus_of_the_policys_ranks_alone(seen: dict[str, Any]) -> None:
    assert seen["exporting"] == 6 - 2


def test_gpus_of_another_job_are_reported(seen: dict[str, Any]) -> None:
    assert seen["refused"].startswith("Ray could not reserve 1 GPU, 2 CPU on ")
    assert "`ray status` shows" in seen["refused"]
