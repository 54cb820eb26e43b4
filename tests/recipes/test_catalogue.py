"""Every recipe is complete; its stages run once, are resumed, and are compared with the expected results."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

import rlsdk
from rlsdk.cli import root
from rlsdk.config import check
from rlsdk.errors import DataError, ValueFault
from rlsdk.recipes import catalogue
from rlsdk.recipes.catalogue import Expected

NAMES = catalogue.names()


def invoke(*arguments, status=0):
    result = CliRunner().invoke(root, ["recipe", *arguments])
    assert result.exit_code == status, result.output
    return result.output


@pytest.mark.parametrize("name", NAMES)
def test_a_recipe_is_whole(name):
    recipe = catalogue.read(name)
    assert len(recipe.text("README.md")) > 300
    least, most = recipe.expected.band
    assert 0 <= least < most <= 1
    before = {"new"} if recipe.new_model is not None else set()
    for stage in recipe.stages:
        assert {stage.start, stage.reference} <= {None, *before}, "a stage starts from one before it"
        before.add(stage.name)
    assert len(before) == len(recipe.stages) + (recipe.new_model is not None)
    assert sum(path.stat().st_size for path in recipe.folder.iterdir()) < 100_000


@pytest.mark.parametrize("name", NAMES)
def test_a_recipe_was_measured_or_says_never_run(name):
    recipe = catalogue.read(name)
    measured = recipe.measurement()
    assert (measured is None) == (recipe.measured == catalogue.NEVER_RUN)
    if measured is None:
        assert "never run" in recipe.text("README.md").lower()
        return
    assert catalogue.verdict(recipe.expected, measured.points)[0], "the committed curve ends in the band"
    assert len(recipe.text("transcript.txt")) > 100
    metric = recipe.expected.metric
    assert measured.points[-1][metric] > measured.points[0][metric]
    last = catalogue.config(recipe, recipe.stages[-1])
    assert (measured.points[0]["step"], measured.points[-1]["step"]) == (0, last["steps"])


@pytest.mark.parametrize("name", NAMES)
def test_the_configurations_of_a_recipe_pass_the_check(name, tmp_path, monkeypatch, request):
    recipe = catalogue.read(name)
    if recipe.needs:
        request.getfixturevalue("gridworlds")
    monkeypatch.chdir(tmp_path)
    for model in ("made", "reference"):
        (tmp_path / model).mkdir()
        (tmp_path / model / "config.json").write_text("{}")
    for stage in recipe.stages:
        made = ["model.path=made"] if stage.start else []
        made += ["model.reference=reference"] if stage.reference else []
        plan = check(recipe.folder / stage.config, made)
        assert plan.config.tasks.eval is not None
        assert stage is recipe.stages[-1] or plan.config.steps is not None, "its model is found by its last step"


def test_three_recipes_find_what_no_demonstration_held():
    """The warm start's best of several attempts is below the trained model's single attempt."""
    found = [row for row in json.loads(invoke("list", "--json")) if row["finds"] and row["to"] is not None]
    assert len(found) >= 3
    assert all(row["ceiling"] < row["to"] for row in found)


def test_the_list_as_a_table_and_as_json(monkeypatch):
    rows = json.loads(invoke("list", "--json"))
    assert [row["name"] for row in rows] == NAMES
    assert {"arithmetic", "calculator", "code", "countdown-0.5b", "countdown-3b", "countdown-nano"} <= set(NAMES)
    assert {"distillation", "frozen-lake", "math", "preference", "reverse-text", "sokoban", "tool-use"} <= set(NAMES)
    monkeypatch.setenv("COLUMNS", "140")
    lines = invoke("list").splitlines()
    assert lines[0].startswith("recipe ") and lines[0].endswith("measured") and "ceiling" in lines[0]
    assert [line.split()[0] for line in lines[1:]] == NAMES
    assert "never run" in next(line for line in lines if line.startswith("math "))


def test_names_are_whole_on_a_narrow_terminal(monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    assert set(NAMES) <= {line.split(" ")[0] for line in invoke("list").splitlines()}


def test_show_prints_readme_commands_and_curve(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    shown = invoke("show", "arithmetic")
    assert catalogue.read("arithmetic").text("README.md").strip() in shown
    assert "rlsdk model new nano runs/recipes/arithmetic/model --largest 99" in shown
    assert "model.path=runs/recipes/arithmetic/warm-start/checkpoints/step-400/export" in shown
    assert "█" in shown and "Ceiling of the warm start" in shown
    found = json.loads(invoke("show", "arithmetic", "--json"))
    assert found["curve"]["points"][0]["step"] == 0 and len(found["commands"]) == 3
    assert "Measured: never run." in invoke("show", "math")


def test_the_commands_of_a_recipe_are_shown_without_running_them(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    lines = invoke("run", "distillation", "algorithm.clip_advantages=5", "--out", "a b", "--dry-run").splitlines()
    assert len(lines) == 4 and lines[0].startswith("rlsdk model new nano 'a b/model'")
    assert "model.reference=a b/teacher/checkpoints/step-" in lines[3]
    assert ["clip_advantages" in line for line in lines] == [False, False, False, True]
    assert not list(tmp_path.iterdir())


def test_an_unknown_recipe_is_answered_with_the_nearest():
    with pytest.raises(ValueFault, match="did you mean 'reverse-text'"):
        catalogue.read("reverse-txt")
    assert "did you mean 'math'" in invoke("show", "maths", status=1)


def test_a_missing_plugin_is_named_with_its_remedy(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("rlsdk.plugins.discovery.discover", dict)
    assert "pip install plugins/rlsdk-gridworlds" in invoke("run", "frozen-lake", status=1)


def test_a_wrong_recipe_file_is_named_with_its_key(tmp_path):
    text = (catalogue.FOLDER / "math" / "recipe.yaml").read_text()
    (tmp_path / "recipe.yaml").write_text(text.replace("hardware:", "hardwear:"))
    with pytest.raises(DataError, match=r"recipe.yaml: .*hardwear.*did you mean 'hardware'"):
        catalogue.read_folder(tmp_path)


def test_words_are_written_backwards_and_scored(tmp_path):
    """Values of the plugin of reverse-text, worked out by hand."""
    plugin = catalogue.FOLDER / "reverse-text" / "reverse.py"
    module = load(plugin)
    taught = module.words(size=200, lengths=(2, 4), demonstrations="right")
    tested = module.words(size=200, lengths=(2, 4), split="test")
    assert all(task.metadata["demonstration"] == task.answer == task.prompt[-2::-1] for task in taught)
    assert not {task.prompt for task in taught} & {task.prompt for task in tested}
    shuffled = module.words(size=50, lengths=(5, 6), demonstrations="shuffled")
    assert all(sorted(task.metadata["demonstration"]) == sorted(task.answer) for task in shuffled)
    task = rlsdk.Task(id="1", prompt="abcd>", answer="dcba")
    scores = [module.places(rlsdk.Rollout.from_text(task, text)) for text in ("dcba", "dcab", "dcbaa", "")]
    assert [score.value for score in scores] == [1.0, 0.5, 0.8, 0.0]
    assert [score.metrics["correct"] for score in scores] == [1.0, 0.0, 0.0, 0.0]


def test_sums_are_taught_and_scored():
    module = load(catalogue.FOLDER / "arithmetic" / "sums.py")
    taught = module.sums(size=200, terms=(2, 3), demonstrations="right")
    assert all(int(task.metadata["demonstration"]) == task.answer == sum(terms(task)) for task in taught)
    form = module.sums(size=400, terms=(4, 5), demonstrations="random")
    assert sum(int(task.metadata["demonstration"]) == task.answer for task in form) < 40
    tested = {tuple(sorted(terms(task))) for task in module.sums(size=200, split="test")}
    assert not tested & {tuple(sorted(terms(task))) for task in module.sums(size=2000)}
    task = rlsdk.Task(id="1", prompt="3+4=", answer=7)
    values = [module.near(rlsdk.Rollout.from_text(task, text)).value for text in ("7", "8", "2", "17", "7+", "٧")]
    assert values == [1.0, pytest.approx(0.45), 0.25, 0.0, 0.0, 0.0]


def load(path):
    import importlib.util

    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def terms(task):
    return [int(number) for number in task.prompt[:-1].split("+")]


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
    with pytest.raises(ValueFault, match=r"different settings.*--overwrite"):
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


def test_a_quick_run_leaves_out_what_a_setting_of_a_whole_section_replaces(tmp_path):
    *_, last = catalogue.commands(catalogue.read("arithmetic"), tmp_path, ("eval={every: 1}",), quick=True)
    assert "eval.limit=8" not in last.arguments
    assert {"steps=2", "checkpoint.every=0", "eval={every: 1}"} <= set(last.arguments)


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
