"""The examples pass the check, including those that train another example's model."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

import rlsdk
from rlsdk.config import check

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = sorted(p for p in (ROOT / "examples").rglob("*.yaml") if "cluster" not in p.parts)


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda p: p.relative_to(ROOT / "examples").as_posix())
def test_the_example_passes_the_check(path, tmp_path, monkeypatch, request):
    if "gridworlds/" in path.read_text():
        request.getfixturevalue("gridworlds")
    monkeypatch.chdir(ROOT)
    (tmp_path / "config.json").write_text("{}")
    trained_before = "warm_start" in path.parts or "path: runs/" in path.read_text()
    made_by_another = ["model.path=" + str(tmp_path)] if trained_before else []
    plan = check(path, made_by_another)
    assert plan.config.tasks.eval is not None


def test_there_are_examples():
    nano = {
        "countdown_nano.yaml",
        "frozen_lake_nano.yaml",
        "calculator_nano.yaml",
        "own_calculator_nano.yaml",
        "dialogue_nano.yaml",
    }
    assert {"quickstart.yaml", "countdown_qwen2.5_0.5b.yaml", *nano} <= {p.name for p in EXAMPLES}


def test_the_parts_of_an_example_agree(gridworlds):
    """The warm start plays in the environment of the example, and its levels are none that it is evaluated on."""
    played = read("frozen_lake_nano.yaml")
    world = played["workflow"]["environment"]
    tested = tasks(played["tasks"]["eval"])
    assert len(tested) == 200
    for name in ("1_skill", "2_dilute"):
        taught = read(f"warm_start/frozen_lake/{name}.yaml")["tasks"]["train"]
        assert taught["environment"] == played["tasks"]["train"]["environment"] == world
        assert not {task.prompt for task in tested} & {task.prompt for task in tasks({**taught, "size": 1_000})}


def read(name):
    return yaml.safe_load((ROOT / "examples" / name).read_text())


def tasks(chosen):
    return rlsdk.load("tasks", chosen["use"], **{k: v for k, v in chosen.items() if k != "use"})()
