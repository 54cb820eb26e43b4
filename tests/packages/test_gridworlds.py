"""The gridworlds, a package unknown to the core: installed, listed, loaded, checked."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("gymnasium")
pytestmark = pytest.mark.slow  # pip builds and installs the package
PACKAGE = Path(__file__).resolve().parents[2] / "plugins" / "rlsdk-gridworlds"
ENVIRONMENTS = [
    "gridworlds/frozen_lake",
    "gridworlds/frozen_lake_think",
    "gridworlds/larger_sokoban",
    "gridworlds/simple_sokoban",
    "gridworlds/sokoban",
    "gridworlds/sokoban_different_grid_vocab",
]


@pytest.fixture(scope="module")
def environment(install):
    """An environment with only the gridworlds, instead of the one with two labs."""
    return install(PACKAGE)


def test_it_is_listed_from_metadata(rlsdk):
    (entry,) = (e for e in json.loads(rlsdk("plugins", "--json").stdout) if e["plugin"] == "gridworlds")
    assert (entry["distribution"], entry["module"], entry["broken"]) == ("rlsdk-gridworlds", "rlsdk_gridworlds", None)


def test_it_shows_its_environments_and_their_options(rlsdk):
    found = json.loads(rlsdk("plugins", "gridworlds", "--json").stdout)
    assert found["broken"] == []
    assert [c["name"] for c in found["components"] if c["kind"] == "environment"] == ENVIRONMENTS
    text = " ".join(rlsdk("plugins", "gridworlds").stdout.split())
    assert "search_depth int = 30" in text
    assert "format_penalty float = -0.15 Reward of a text without a valid action." in text


def test_it_is_loaded_by_name(environment, tmp_path):
    code = (
        "import rlsdk\n"
        "task = rlsdk.load('tasks', 'gridworlds/levels', environment='gridworlds/sokoban', split='test')()[0]\n"
        "chosen = dict(task.metadata['environment'])\n"
        "world = rlsdk.load('environment', chosen.pop('use'), **chosen)\n"
        "print(world.reset(task.metadata['seed']).text == task.prompt)\n"
        "print(world.step('<answer>Up</answer>').metrics['valid_actions'])\n"
    )
    command = [sys.executable, "-c", code]
    ran = subprocess.run(command, capture_output=True, text=True, check=True, env=environment, cwd=tmp_path)
    assert ran.stdout.splitlines() == ["True", "1.0"]


def test_it_conforms(rlsdk):
    found = json.loads(rlsdk("check", "gridworlds", "--json").stdout)
    assert (found["conforms"], found["counts"]["skipped"]) == (True, 0)
    assert {f["component"] for f in found["findings"] if f["property"] == "any-text"} == set(ENVIRONMENTS)
