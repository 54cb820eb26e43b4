"""`rlsdk export`: the model of a checkpoint, complete or not there at all."""

from __future__ import annotations

import pytest
from click.testing import CliRunner

from rlsdk.cli import root

pytest.importorskip("ray")


@pytest.fixture
def finished(tmp_path):
    """The folder of a run with two checkpoints that hold an export."""
    folder = tmp_path / "runs" / "trial"
    for step in (2, 10):
        export = folder / "checkpoints" / f"step-{step}" / "export"
        export.mkdir(parents=True)
        (export / "config.json").write_text(f'{{"step": {step}}}')
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


def test_an_empty_folder_is_taken(finished, tmp_path):
    (tmp_path / "model").mkdir()
    export(finished, tmp_path / "model")
    assert (tmp_path / "model" / "config.json").exists()


def test_nothing_is_overwritten(finished, tmp_path):
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "mine").write_text("x")
    assert "holds something already" in export(finished, tmp_path / "model", status=1)
    assert [p.name for p in (tmp_path / "model").iterdir()] == ["mine"]
    assert "holds something already" in export(finished, tmp_path / "model" / "mine", status=1)


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


def test_a_run_that_must_start_its_learner_is_checked_first(finished, tmp_path):
    for file in (finished / "checkpoints" / "step-10" / "export").iterdir():
        file.unlink()
    (finished / "checkpoints" / "step-10" / "export").rmdir()
    assert "model: is required" in export(finished, tmp_path / "model", status=2)
    assert not list(tmp_path.glob("*model*"))
