"""Newcomers' mistakes, each with rlsdk's answer: the rows of `table.yaml`."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner, Result

from rlsdk import preflight
from rlsdk.checkpoints.checkpoint import SECTIONS, Checkpoints
from rlsdk.cli import root
from rlsdk.config import check
from rlsdk.evaluation import models
from rlsdk.opening import record
from rlsdk.opening.resuming import prepare_folder
from rlsdk.runlog import actors
from rlsdk.runlog.folder import held
from rlsdk.runlog.store import Address, RolloutStore
from rlsdk.serving import debug
from rlsdk.trainer import run

HERE = Path(__file__).parent
MODEL = HERE.parents[1] / "examples" / "models" / "countdown-nano"
TABLE = yaml.safe_load((HERE / "table.yaml").read_text(encoding="utf-8"))
ROWS = [row for row in TABLE if "run" in row]
MISTAKES = range(1, 85)


def copied(model: Path, **changes: dict[str, Any]) -> None:
    """The small model, with changes of its files: name -> the keys that differ."""
    shutil.copytree(MODEL, model)
    for name, keys in changes.items():
        file = model / f"{name}.json"
        file.write_text(json.dumps({**json.loads(file.read_text()), **keys}))


def run_that_ended() -> None:
    """A run with a checkpoint, a plugin that observed, and engines that are gone."""
    plan = check("base.yaml", ["name=ended"], ["observer.py"])
    checkpoints = Checkpoints(plan.folder, 2)
    prepare_folder(plan, checkpoints, resume=False, overwrite=False, allow_changes=False)
    checkpoints.save(2, {**{key: {} for key in SECTIONS}, "plugins": plan.code}, lambda _: None)
    state = actors.EngineScaling(wanted=1, alive=(0,), lost=0, refused="", driver=os.getpid())
    actors.write_status(plan.folder, state)
    actors.mark_ended(plan.folder, "finished")


def run_that_goes_on() -> None:
    """A run between two steps whose rollouts are saved."""
    folder = Path("runs/begun")
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text("save_rollouts: 10\n")
    (folder / "metrics.jsonl").write_text("".join(f'{{"step": {step}}}\n' for step in range(5)))
    RolloutStore(Address.make(folder, None, None)).close()


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder that the head of the table describes."""
    folder = tmp_path_factory.mktemp("mistakes") / "lab"
    shutil.copytree(HERE / "files", folder)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        copied(Path("nano"))
        none = {"eos_token_id": None}
        copied(Path("no-end"), config=none, generation_config=none, tokenizer_config={"eos_token": None})
        template = "{% for m in messages %}{{ m.contents }}{% endfor %}"
        copied(Path("typo-template"), tokenizer_config={"chat_template": template})
        run_that_ended()
        run_that_goes_on()
    return folder


@pytest.fixture
def lab(prepared: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A copy of that folder as the working folder, on a poor machine; Ray must not be started."""
    import torch
    from huggingface_hub import constants

    monkeypatch.chdir(shutil.copytree(prepared, tmp_path / "lab"))
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    known = preflight.version
    monkeypatch.setattr(preflight, "version", lambda name: None if name == "wandb" else known(name))
    monkeypatch.delenv("RAY_ADDRESS", raising=False)

    def started(*_: Any, **__: Any) -> None:
        raise AssertionError("Ray would have been started")

    for module in (record, models, debug):
        monkeypatch.setattr(module, "ray_cluster", started)


def rlsdk(command: str) -> Result:
    return CliRunner().invoke(root, shlex.split(command), env={"COLUMNS": "200"})


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row['mistake']}-{row['is']}-{row['run'].split()[0]}")
def test_a_mistake_is_answered_in_words(lab: None, row: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    if "packages" in row:
        monkeypatch.syspath_prepend(str(Path(row["packages"]).absolute()))
    ran = rlsdk(row["run"])
    assert ran.exception is None or isinstance(ran.exception, SystemExit), ran.exception
    said = " ".join(ran.output.split())
    for words in row.get("says", []):
        assert " ".join(words.split()) in said
    for words in ["Traceback", *row.get("plain", [])]:
        assert words not in said
    assert ran.exit_code == row["status"], said


def test_a_finished_run_is_not_started_again(lab: None) -> None:
    summary = {"name": "ended", "status": "finished", "steps": 2}
    Path("runs/ended/summary.json").write_text(json.dumps(summary))
    ran = rlsdk("train base.yaml name=ended --resume --plugin observer.py --json")
    assert ran.exit_code == 0, ran.output
    assert json.loads(ran.stdout) == summary
    said = " ".join(ran.stderr.split())
    assert "nothing is left to train: runs/ended has trained all of its 2 steps" in said
    assert "give more steps, such as steps=4" in said
    changed = rlsdk("train base.yaml name=ended learner.lr=0.5 --resume --plugin observer.py")
    assert changed.exit_code == 2 and "learner.lr: was 1e-06, is 0.5" in changed.output


@pytest.mark.parametrize("how", ["", "--overwrite", "--resume"])
def test_a_run_that_trains_is_neither_deleted_nor_resumed(lab: None, how: str) -> None:
    before = sorted(Path("runs/ended").rglob("*"))
    with held(Path("runs/ended")):
        ran = rlsdk(f"train base.yaml name=ended {how} --plugin observer.py")
    said = " ".join(ran.output.split())
    assert f"name: runs/ended is in use by process {os.getpid()} on " in said
    assert "wait until it ends, end it, or choose another name" in said and "Traceback" not in said
    assert ran.exit_code == 2
    assert sorted(Path("runs/ended").rglob("*")) == before


def test_every_mistake_has_its_grade_and_nothing_misleads_or_is_silently_wrong() -> None:
    worst: dict[int, str] = {}
    for row in TABLE:
        number = int(re.match(r"\d+", str(row["mistake"]))[0])  # type: ignore[index]
        worst[number] = max(worst.get(number, "A"), row["grade"])
    assert sorted(worst) == [*MISTAKES]
    assert set(worst.values()) <= {"A", "B"}
    assert sum(grade == "A" for grade in worst.values()) >= 70


def test_a_mistake_that_needs_the_whole_stack_has_its_test() -> None:
    for row in TABLE:
        if "test" in row:
            file, _, name = row["test"].partition("::")
            assert f"def {name}(" in (HERE.parents[1] / file).read_text(encoding="utf-8")


def test_every_file_is_used_by_a_row() -> None:
    commands = " ".join(f"{row['run']} {row.get('packages', '')}" for row in ROWS)
    texts = commands + "".join(file.read_text() for file in (HERE / "files").glob("*.yaml"))
    assert [file.name for file in (HERE / "files").iterdir() if file.name not in texts] == []


@pytest.mark.parametrize(
    ("settings", "path", "kind"),
    [
        ("learner.lrr=1", "learner.lrr", "faults"),
        ("max_prompt_tokens=2", "max_prompt_tokens", "faults"),
        ("model.path=no-end", "model.path", "faults"),
        ("placement.device=cuda", "placement.device", "warnings"),
        ("placement.engines=16", "placement.engines", "warnings"),
        ("model.path=org/model", "model.path", "warnings"),
        ("trackers=[wandb]", "trackers", "warnings"),
    ],
)
def test_explain_tells_faults_from_warnings_as_json(lab: None, settings: str, path: str, kind: str) -> None:
    ran = rlsdk(f"explain base.yaml --json {settings}")
    found = json.loads(ran.stdout)
    assert [each["path"] for each in found[kind]] == [path] and found[kind][0]["message"]
    assert set(found) == {"faults", "warnings", "notes", "plan", "disk", "memory", "memory_unknown"}
    assert ran.exit_code == (2 if kind == "faults" else 0)
    assert (found["plan"] is None) == (settings == "learner.lrr=1")


def test_a_cluster_has_its_own_devices(lab: None) -> None:
    ran = rlsdk("explain base.yaml placement.ray=auto placement.device=cuda placement.engines=16 --json")
    assert json.loads(ran.stdout)["warnings"] == []


def test_a_configuration_without_a_mistake_has_none(lab: None) -> None:
    ran = rlsdk("explain base.yaml --json")
    found = json.loads(ran.stdout)
    assert (found["faults"], found["warnings"], ran.exit_code) == ([], [], 0)
    with pytest.raises(AssertionError, match="Ray would have been started"):
        run.run(check("base.yaml"))


def test_damaged_checkpoints_are_all_named_before_ray_starts(lab: None) -> None:
    Path("runs/ended/checkpoints/step-2/state.json").write_text("")
    ran = rlsdk("train base.yaml name=ended --resume --plugin observer.py")
    assert ran.exit_code == 1 and isinstance(ran.exception, SystemExit)
    assert "no checkpoint in runs/ended/checkpoints is intact" in ran.output and "step-2" in ran.output
