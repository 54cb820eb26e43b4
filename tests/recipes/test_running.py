"""Stages are run once, resumed, and compared with the expected results; some recipes are run in full."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from rlsdk.errors import ValueFault
from rlsdk.recipes import catalogue
from rlsdk.recipes.catalogue import Expected

SHORT = ("preference", "longer-ways", "arithmetic", "reverse-text")
"""Measured recipes for two cores from random weights, the cheapest first."""


@pytest.fixture
def ran(monkeypatch):
    """Commands that would have run; each leaves its expected files."""
    commands = []

    def run(command, check, stdout):
        commands.append(command[3:])
        out = next((Path(c.partition("=")[2]) for c in command if c.startswith("out=")), None)
        if out is None:
            result = Path(command[6]) / "config.json"
            status = {}
        else:
            name = next(c.partition("=")[2] for c in command if c.startswith("name="))
            result = out / name / "summary.json"
            status = {"status": "finished"}
        result.parent.mkdir(parents=True, exist_ok=True)
        result.write_text(json.dumps(status))
        return subprocess.CompletedProcess(command, 0)

    monkeypatch.setattr(catalogue.subprocess, "run", run)
    return commands


def go(out, *settings, overwrite=False):
    recipe = catalogue.read("arithmetic")
    steps = catalogue.commands(recipe, out, settings)
    lines = []
    catalogue.run(recipe, out, steps, lines.append, overwrite=overwrite)
    return lines


def test_stages_that_have_ended_are_not_run_again(tmp_path, ran):
    go(tmp_path)
    assert [command[0] for command in ran] == ["model", "train", "train"]
    assert all("done" in line for line in go(tmp_path))
    assert len(ran) == 3


def test_an_interrupted_stage_is_resumed_and_the_later_ones_begin(tmp_path, ran):
    go(tmp_path)
    ran.clear()
    (tmp_path / "warm-start" / "summary.json").write_text(json.dumps({"status": "interrupted"}))
    saved = tmp_path / "warm-start" / "checkpoints" / "step-3" / "state.json"
    saved.parent.mkdir(parents=True)
    saved.touch()
    go(tmp_path)
    assert [command[-1] for command in ran] == ["--resume", "--overwrite"]


def test_other_settings_need_overwrite(tmp_path, ran):
    go(tmp_path)
    with pytest.raises(ValueFault, match=r"other settings.*--overwrite"):
        go(tmp_path, "steps=3")
    ran.clear()
    go(tmp_path, "steps=3", overwrite=True)
    assert len(ran) == 3 and "steps=3" in ran[2] and "steps=3" not in ran[1]


def test_stages_keep_their_names_and_folders(tmp_path):
    for setting in ("name=mine", f"out={tmp_path}"):
        with pytest.raises(ValueFault, match="every stage of a recipe has its own; --out gives the folder of all"):
            catalogue.commands(catalogue.read("arithmetic"), tmp_path, ("steps=3", setting))


def test_a_failed_stage_ends_the_recipe_with_its_status(tmp_path, monkeypatch):
    monkeypatch.setattr(
        catalogue.subprocess, "run", lambda command, check, stdout: subprocess.CompletedProcess(command, 130)
    )
    with pytest.raises(catalogue.StageError, match="model ended with status 130") as caught:
        go(tmp_path)
    assert caught.value.status == 130


def test_the_band():
    expected = Expected(band=(0.5, 0.8))
    assert catalogue.verdict(expected, [{"eval/sampled": 0.5}]) == (
        True,
        "eval/sampled 0.500 lies in the expected band, 0.5 to 0.8",
    )
    assert catalogue.verdict(expected, [{"eval/sampled": 0.9}])[1].startswith("eval/sampled 0.900 is above")
    assert catalogue.verdict(expected, [{"eval/sampled": 0.6}, {"eval/sampled": 0.4}])[0] is False
    assert catalogue.verdict(expected, [])[0] is False


@pytest.mark.stack
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_quick_run_trains_every_stage(tmp_path):
    done = recipe_run("longer-ways", "--quick", "--json", cwd=tmp_path)
    assert done.returncode == 0, done.stderr[-2000:]
    assert json.loads(done.stdout)["in_band"] is None
    assert {"model", "warm-start", "rl"} <= {p.name for p in (tmp_path / "runs/recipes/longer-ways-quick").iterdir()}


@pytest.mark.stack
@pytest.mark.slow
@pytest.mark.long
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", SHORT)
def test_a_recipe_ends_in_its_band(name, tmp_path):
    done = recipe_run(name, cwd=tmp_path)
    assert done.returncode == 0, done.stderr[-2000:]
    assert "lies in the expected band" in done.stdout


def recipe_run(*arguments, cwd):
    command = [sys.executable, "-m", "rlsdk.cli", "recipe", "run", *arguments]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, check=False)
