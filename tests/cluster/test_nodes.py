"""Nodes compared with the driver's machine: missing packages, versions, and access to the run's folder."""

from __future__ import annotations

import logging
import subprocess
import sys
import time
from pathlib import Path

import pytest

from rlsdk.cluster.nodes import (
    DrainingNode,
    NodeReport,
    absent_resources,
    check_folder,
    package_faults,
    too_many_actors,
)
from rlsdk.errors import EnvironmentFault

HERE = {"rlsdk": "0.9.0", "rlsdk-mylab": "0.1.0", "torch": "2.13.0+cpu", "vllm": "0.32.0"}


def test_missing_and_different_packages_are_named_with_node_and_command() -> None:
    same = NodeReport("10.0.0.1 (a)", HERE)
    lacks = NodeReport("10.0.0.2 (b)", {"rlsdk": "0.8.0"})
    assert package_faults(HERE, ["rlsdk", "rlsdk-mylab"], [same, lacks]) == [
        "  10.0.0.2 (b): rlsdk is 0.8.0 (0.9.0 here), rlsdk-mylab is missing (0.1.0 here); "
        "run there: pip install rlsdk==0.9.0 rlsdk-mylab==0.1.0"
    ]


def test_other_releases_of_the_stack_are_a_difference_and_other_builds_are_not() -> None:
    gpu = NodeReport("gpu", {"torch": "2.13.0+cu130"})
    old = NodeReport("old", {"torch": "2.12.1+cu130", "vllm": "0.32.0"})
    assert package_faults(HERE, ["torch", "vllm"], [gpu, old]) == [
        "  old: torch is 2.12.1+cu130 (2.13.0+cpu here); run there: pip install torch==2.13.0"
    ]


def test_a_folder_that_no_learner_node_sees_is_refused_and_some_are_warned_of(
    caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    blind, sees = NodeReport("b", HERE, sees=False), NodeReport("a", HERE)
    samples = NodeReport("c", HERE, sees=False, trains=False)
    with pytest.raises(EnvironmentFault, match=r"no node that may train \(b\) sees .* put `out` on a disk that"):
        check_folder(tmp_path, [blind, samples])
    check_folder(tmp_path, [sees, samples])
    assert not caplog.records
    with caplog.at_level(logging.WARNING):
        check_folder(tmp_path, [sees, blind])
    assert f"{tmp_path} is not visible on b; a learner rank that is placed there ends the run" in caplog.text


def test_resources_that_no_node_has_are_named() -> None:
    nodes = [{"CPU": 4.0, "training": 1.0, "node:10.0.0.1": 1.0, "memory": 1e9}, {"CPU": 4.0, "sampling": 2.0}]
    known = "the nodes have CPU, sampling, training. The run waits until one joins"
    assert list(absent_resources({"placement.engine_resources": {"sampling": 1.0}, "b": {}}, nodes)) == []
    (text,) = absent_resources({"placement.engine_resources": {"samplin": 1.0}, "b": {"training": 1.0}}, nodes)
    assert text == f"placement.engine_resources: no node of the cluster has samplin 1; {known}"
    both = {"sampling": 1.0, "training": 1.0}  # on different nodes
    (text,) = absent_resources({"placement.engine_resources": both}, nodes)
    assert "has sampling 1, training 1;" in text


def test_resources_that_all_actors_never_have_at_once_are_named() -> None:
    nodes = [{"CPU": 2.0, "training": 1.0}, {"CPU": 1.0}]
    assert list(too_many_actors([(2, {}), (1, {"training": 1.0})], nodes)) == []
    assert list(too_many_actors([(2, {}), (2, {"training": 1.0})], nodes)) == [
        "placement: the 4 engines and learner ranks of the run hold 4 CPU at once, and the nodes of the cluster have "
        "3. The run waits until more join",
        "placement: the 4 engines and learner ranks of the run hold 2 training at once, and the nodes of the cluster "
        "have 1. The run waits until more join",
    ]


def test_work_is_handed_back_before_the_deadline_and_never_if_there_is_none() -> None:
    soon, late = (DrainingNode("a", "here", time.time() + seconds) for seconds in (2, 100))
    assert soon.seconds_to_finish == 0
    assert 94 < (late.seconds_to_finish or 0) <= 95
    assert DrainingNode("a", "here").seconds_to_finish is None


def test_a_message_says_when_the_node_goes_if_that_is_known() -> None:
    assert str(DrainingNode("a", "10.0.0.12 (w, node 5b3c61aa)", time.time() + 90.4)) == (
        "10.0.0.12 (w, node 5b3c61aa), which leaves the cluster in 90 s (Ray is draining it)"
    )
    assert str(DrainingNode("a", "here")) == "here, which leaves the cluster (Ray is draining it)"


def run(case: str) -> None:
    """Run a case of `draining_lab` to its end."""
    command = [sys.executable, str(Path(__file__).with_name("draining_lab.py")), case]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert ran.returncode == 0, ran.stderr[-4000:]


@pytest.mark.slow
@pytest.mark.stack
def test_drained_nodes_are_found_with_their_deadline_and_get_nothing_new() -> None:
    run("found")


@pytest.mark.slow
@pytest.mark.stack
def test_an_engine_that_moves_gets_the_gpu_that_ray_reserves_elsewhere_once_its_node_is_gone() -> None:
    run("moved")
