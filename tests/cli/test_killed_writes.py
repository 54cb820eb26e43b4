"""Commands that are killed while they write or delete leave nothing half-done that a later call trips over."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from rlsdk.cli import root
from rlsdk.cli.eval import _prepare
from rlsdk.opening.changes import KEPT
from rlsdk.opening.resuming import _keep_config
from rlsdk.recipes import catalogue
from rlsdk.runlog import trackers
from tests.trainer.fakes import make_plan


class Killed(BaseException):
    """Stands for SIGKILL, after which no handler writes anything."""


@pytest.fixture
def killed_in_write(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """Kill the first write of a text after half of it; undo it to let later ones finish."""

    def write_text(path: Path, text: str, **how: Any) -> int:
        with path.open("w", encoding="utf-8") as file:
            file.write(text[: len(text) // 2])
        raise Killed

    monkeypatch.setattr(Path, "write_text", write_text)
    return monkeypatch


def migrate(folder: Path) -> None:
    (folder / "grpo.sh").open("w").write("trl grpo --model_name_or_path m --learning_rate 1e-5 --max_steps 5\n")
    files = ["--out", str(folder / "out.yaml"), "--table", str(folder / "table.md")]
    result = CliRunner().invoke(root, ["migrate", "trl", str(folder / "grpo.sh"), *files], catch_exceptions=False)
    assert result.exit_code == 0, result.output


def recipe(folder: Path) -> None:
    catalogue.run(catalogue.read(catalogue.names()[0]), folder / "out", [], lambda line: None, overwrite=False)


def service(folder: Path) -> None:
    from rlsdk.contracts import Run

    run = Run("run", folder, {}, 3)
    trackers.keep_service_run(run, "board", "0123456789")
    assert trackers.service_run(run, "board") == "0123456789"


def settings(folder: Path) -> None:
    plan = make_plan(folder)
    plan.folder.mkdir(parents=True, exist_ok=True)
    if not (plan.folder / KEPT).exists():
        (plan.folder / KEPT).open("w").write("steps: 5\n")
    _keep_config(plan, changed=True, new=False, step=3)


@pytest.mark.parametrize("write, files", [
    (migrate, ["out.yaml", "table.md"]),
    (recipe, [f"out/{catalogue.RECORD}"]),
    (service, ["trackers/board"]),
    (settings, ["run/config.step-3.yaml"]),
])  # fmt: skip
def test_a_file_is_written_as_a_whole_or_not_at_all(
    write: Any, files: list[str], tmp_path: Path, killed_in_write: pytest.MonkeyPatch
) -> None:
    with pytest.raises(Killed):
        write(tmp_path)
    assert not any((tmp_path / file).exists() for file in files)
    killed_in_write.undo()
    write(tmp_path)
    assert all((tmp_path / file).stat().st_size for file in files)


def test_an_evaluation_whose_deletion_was_killed_is_overwritten_by_the_next_call(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "eval"
    (folder / "logs").mkdir(parents=True)
    for name in ("evaluation.json", "transcripts.jsonl"):
        (folder / name).touch()

    def rmtree(path: Path, **how: Any) -> None:
        (path / "evaluation.json").unlink()
        (path / "logs").rmdir()
        raise Killed

    with monkeypatch.context() as patched:
        patched.setattr(shutil, "rmtree", rmtree)
        with pytest.raises(Killed):
            _prepare(folder, overwrite=True)
    _prepare(folder, overwrite=True)
    assert not list(tmp_path.iterdir())
