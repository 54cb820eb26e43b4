"""Nodes that Ray drains: identity, deadline, and no new actors on them; all nodes are on this machine."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest

from rlsdk.cluster.draining import DrainingNode


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
