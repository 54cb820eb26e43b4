"""`rlsdk export`: the model of a checkpoint is complete or absent."""

from __future__ import annotations

import errno
import json
import os
import shutil
from contextlib import contextmanager
from functools import partial

import pytest
import yaml
from click.testing import CliRunner

from rlsdk.checkpoints import export as exporting
from rlsdk.checkpoints.checkpoint import SECTIONS, Checkpoints
from rlsdk.cli import root
from rlsdk.errors import RunError
from rlsdk.isolation import reaper
from rlsdk.isolation.watching import CURRENT

pytest.importorskip("ray")


def write(step, folder):
    (folder / "learner").mkdir()
    (folder / "export").mkdir()
    (folder / "export" / "config.json").write_text(f'{{"step": {step}}}')


@pytest.fixture
def finished(tmp_path):
    """The folder of a run with two checkpoints that hold an export."""
    folder = tmp_path / "runs" / "trial"
    for step in (2, 10):
        Checkpoints(folder, 2).save(step, {name: {} for name in SECTIONS}, partial(write, step))
    (folder / "checkpoints" / ".step-12.partial" / "export").mkdir(parents=True)
    (folder / "config.yaml").write_text("name: trial\n")
    return folder


def export(*arguments, status=0):
    ran = CliRunner().invoke(root, ["export", *map(str, arguments)])
    assert ran.exit_code == status, ran.stderr
    return ran.output if status == 0 else ran.stderr


def test_the_newest_complete_checkpoint_is_copied(finished, tmp_path):
    assert export(finished, tmp_path / "model") == f"{tmp_path / 'model'}: the model of {finished} after step 10\n"
    assert (tmp_path / "model" / "config.json").read_text() == '{"step": 10}'
    assert not [p.name for p in tmp_path.iterdir() if "partial" in p.name]


def test_a_step_may_be_chosen(finished, tmp_path):
    export(finished, tmp_path / "deep" / "model", "--step", 2)
    assert (tmp_path / "deep" / "model" / "config.json").read_text() == '{"step": 2}'


@pytest.mark.parametrize("given", ["model", "."])
def test_an_empty_folder_is_filled_even_if_it_is_the_current_one(finished, tmp_path, monkeypatch, given):
    (tmp_path / "model").mkdir()
    monkeypatch.chdir(tmp_path / "model" if given == "." else tmp_path)
    export(finished, given)
    assert [path.name for path in (tmp_path / "model").iterdir()] == ["config.json"]


def test_a_full_disk_is_named_once(finished, tmp_path, monkeypatch):
    def copy(source, target, **_):
        raise OSError(errno.ENOSPC, "No space left on device", target)

    monkeypatch.setattr(shutil, "copytree", partial(shutil.copytree, copy_function=copy))
    (tmp_path / "model").mkdir()
    said = export(finished, tmp_path / "model", status=1)
    assert "model cannot be written: [Errno 28] No space left on device: " in said
    assert not list((tmp_path / "model").iterdir())


def test_a_checkpoint_that_the_run_deletes_meanwhile_is_named(finished, tmp_path, monkeypatch):
    copytree = shutil.copytree

    def copy(source, *where, **how):
        shutil.rmtree(source.parent)
        return copytree(source, *where, **how)

    monkeypatch.setattr(shutil, "copytree", copy)
    said = export(finished, tmp_path / "model", status=1)
    assert "step-10 was deleted while it was read" in said and "export a newer one" in said


@pytest.mark.parametrize("exists", [False, True])
def test_what_a_killed_export_left_does_not_stay(finished, tmp_path, exists):
    folder = tmp_path / "model"
    left = folder / ".export.partial" if exists else tmp_path / ".model.partial"
    left.mkdir(parents=True)
    (left / "half.safetensors").write_bytes(b"x")
    export(finished, folder)
    assert [path.name for path in folder.iterdir()] == ["config.json"]
    assert not left.exists()


def test_nothing_is_overwritten(finished, tmp_path):
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "mine").write_text("x")
    assert "is not empty" in export(finished, tmp_path / "model", status=1)
    assert [p.name for p in (tmp_path / "model").iterdir()] == ["mine"]
    assert "mine is a file; choose" in export(finished, tmp_path / "model" / "mine", status=1)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--step", 3), "has no checkpoint of step 3; there are: 2, 10"),
        (("--step", 12), "has no checkpoint of step 12; there are: 2, 10"),
    ],
)
def test_a_checkpoint_that_is_not_there(finished, tmp_path, arguments, message):
    assert message in export(finished, tmp_path / "model", *arguments, status=1)
    assert not (tmp_path / "model").exists()


def test_what_is_no_run(tmp_path):
    assert "is not the folder of a run: it has no config.yaml" in export(tmp_path, tmp_path / "model", status=1)
    (tmp_path / "config.yaml").write_text("name: x\n")
    assert "has no complete checkpoint" in export(tmp_path, tmp_path / "model", status=1)


def without_export(finished, config):
    """Leave the newest checkpoint without its export."""
    folder = finished / "checkpoints" / "step-10"
    Checkpoints(finished, 2).save(10, {name: {} for name in SECTIONS}, lambda folder: (folder / "learner").mkdir())
    assert not (folder / "export").exists()
    (finished / "config.yaml").write_text(yaml.safe_dump({"name": "trial", **config}))


def test_a_run_that_must_start_its_learner_is_checked_first(finished, tmp_path):
    without_export(finished, {})
    assert "model: is required" in export(finished, tmp_path / "model", status=2)
    assert not list(tmp_path.glob("*model*"))


def test_processes_that_are_started_for_an_export_are_watched_and_end_with_it(finished, tmp_path, monkeypatch):
    seen = []

    @contextmanager
    def cluster(plan):
        seen.extend((CURRENT.get() is not None, reaper.MARK in os.environ))
        raise RunError("enough")
        yield

    (tmp_path / "base").mkdir()
    (tmp_path / "base" / "config.json").write_text("{}")
    model = {"path": str(tmp_path / "base")}
    without_export(finished, {"model": model, "tasks": {"train": "countdown"}, "reward": "countdown", "steps": 1})
    monkeypatch.setattr(exporting, "ray_cluster", cluster)
    assert "enough" in export(finished, tmp_path / "model", status=1)
    assert seen == [True, True]
    assert reaper.MARK not in os.environ


def test_a_damaged_checkpoint_is_not_exported(finished, tmp_path):
    file = finished / "checkpoints" / "step-10" / "export" / "config.json"
    file.write_text('{"step": 11}')
    said = " ".join(export(finished, tmp_path / "model", "--step", 10, status=1).split())
    assert "step-10 is damaged: changed since they were written: config.json; other steps there: 2" in said
    assert not (tmp_path / "model").exists()
    export(finished, tmp_path / "model")
    assert (tmp_path / "model" / "config.json").read_text() == '{"step": 2}'


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("pytorch_model.bin", ""),
        ("modeling_mine.py", ""),
        ("adapter/adapter_model.bin", ""),
        ("optimizer.pt", ""),
        ("config.json", '{"auto\\u005fmap": {"AutoConfig": "somebody/else--config.Config"}}'),
        ("tokenizer_config.json", "\x80"),
    ],
)
def test_what_may_be_code_is_not_taken_from_an_export(finished, tmp_path, name, content):
    file = finished / "checkpoints" / "step-10" / "export" / name
    file.parent.mkdir(exist_ok=True)
    file.write_text(content)
    state = finished / "checkpoints" / "step-10" / "state.json"
    kept = json.loads(state.read_text())
    del kept["sha256"], kept["export"]  # as a checkpoint of an earlier version: nothing says what was written
    state.write_text(json.dumps(kept))
    said = " ".join(export(finished, tmp_path / "model", status=1).split())
    assert f"export holds {name}: only safetensors and text files are read from a run's folder" in said
    assert not (tmp_path / "model").exists()


@pytest.mark.parametrize(
    ("config", "shown"),
    [
        ({"plugins": ["TRAP"]}, "plugins[0]: TRAP (sha256 "),
        ({"reward": {"use": "foreign", "path": "TRAP:score"}}, "reward[0].path: TRAP:score (sha256 "),
        ({"reward": {"use": "foreign", "path": "trap:score"}}, "reward[0].path: trap:score was not in what you gave"),
        (
            {"model": {"path": "there", "trust_remote_code": True}},
            "model.trust_remote_code: true was not in what you gave",
        ),
    ],
    ids=str,
)
def test_code_that_the_runs_configuration_names_is_not_executed(finished, tmp_path, config, shown):
    trap, trace = tmp_path / "trap.py", tmp_path / "trace"
    trap.write_text(f"import pathlib\n\npathlib.Path({str(trace)!r}).touch()\n\n\ndef score(completions): ...\n")
    config = json.loads(json.dumps(config).replace("TRAP", str(trap)))
    without_export(finished, {"tasks": {"train": "countdown"}, **config})
    said = export(finished, tmp_path / "model", status=2)
    assert "names code that would be executed" in " ".join(said.split())
    assert shown.replace("TRAP", str(trap)) in said
    assert not trace.exists()
    if "plugins" in config:
        assert "model: is required" in export(finished, tmp_path / "model", "--plugin", trap, status=2)
        assert trace.exists()
