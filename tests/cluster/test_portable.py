"""A plan is complete in another process: plugins, code versions and environment."""

from __future__ import annotations

import pickle
import subprocess
import sys
from pathlib import Path

import attrs
import pytest

from rlsdk.cluster.portable import PortablePlan, Surroundings, portable
from rlsdk.config import Plan, check
from rlsdk.errors import ConfigError, FingerprintError, RunError

MODEL = Path(__file__).parents[2] / "examples" / "models" / "countdown-nano"
LAB = '''
import attrs
import rlsdk

@rlsdk.algorithm("own")
@attrs.frozen(kw_only=True)
class Own(rlsdk.load("algorithm", "grpo").__class__):
    """An algorithm whose class only this file defines."""

@rlsdk.reward("length")
def length(rollout, *, most: int = 5) -> float:
    return float(len(rollout.response) < most)
'''
SHOW = """
import os, pickle, sys
packed, surroundings = pickle.load(sys.stdin.buffer)
surroundings.take_over()
plan = packed.plan()
reward = plan.plugins.resolve(plan.rewards[0].reference)
print(type(plan.algorithm).__name__, reward.options["most"], plan.config.steps, os.getcwd(), os.environ["LAB_KEY"])
"""


@pytest.fixture
def plan(tmp_path: Path) -> Plan:
    """A plan with an algorithm and a reward of a file."""
    lab = tmp_path / "portable_lab.py"
    lab.write_text(LAB)
    config = {
        "name": "run",
        "out": str(tmp_path),
        "model": {"path": str(MODEL)},
        "tasks": {"train": "countdown"},
        "algorithm": "portable_lab/own",
        "reward": {"use": "portable_lab/length", "most": 3},
        "steps": 7,
    }
    return check(config, plugins=[lab])


def test_a_process_that_never_saw_the_plugins_unpacks_the_same_plan(plan: Plan, tmp_path: Path) -> None:
    sent = pickle.dumps((PortablePlan.of(plan), Surroundings(str(tmp_path), {"LAB_KEY": "secret", "RAY_X": "1"})))
    ran = subprocess.run([sys.executable, "-c", SHOW], input=sent, capture_output=True, check=False)
    assert ran.returncode == 0, ran.stderr.decode()
    assert ran.stdout.decode().split() == ["Own", "3", "7", str(tmp_path), "secret"]


def test_other_code_of_a_plugin_is_refused(plan: Plan) -> None:
    packed = PortablePlan.of(plan)
    [(path, text)] = packed.files
    with pytest.raises(FingerprintError, match="'portable_lab' differs between driver and worker"):
        attrs.evolve(packed, files=((path, f"{text}\n# changed"),)).plan()


def test_a_missing_folder_is_reported(caplog: pytest.LogCaptureFixture, tmp_path: Path) -> None:
    before = Path.cwd()
    Surroundings(str(tmp_path / "elsewhere"), {}).take_over()
    assert Path.cwd() == before
    assert "elsewhere is not on this machine" in caplog.text


def test_an_error_that_cannot_be_pickled_travels_as_its_text() -> None:
    class OwnError(Exception):
        def __init__(self, one: int, two: int) -> None:
            super().__init__(f"{one} and {two}")

    same = portable(ConfigError(["tasks: wrong"]))
    assert isinstance(same, ConfigError) and same.faults == ("tasks: wrong",)
    other = portable(OwnError(1, 2))
    assert isinstance(other, RunError) and str(other) == "OwnError: 1 and 2"
