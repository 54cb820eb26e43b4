"""Nodes compared with the driver's machine: missing packages, versions, and access to the run's folder."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from rlsdk.cluster.nodes import NodeReport, check_folder, package_faults
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
