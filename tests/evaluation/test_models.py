"""The folder of an evaluation tells whose checkpoint was evaluated."""

from __future__ import annotations

from pathlib import Path

import pytest

from rlsdk.config import Plan, check
from rlsdk.evaluation.models import default_folder


def plan_of(folder: Path, **more: str) -> Plan:
    model = folder / "nano"
    model.mkdir()
    (model / "config.json").write_text("{}")
    given = {"name": "mine", "model": str(model), "tasks": {"train": "countdown"}, "reward": "countdown", "steps": 1}
    return check({**given, **more})


@pytest.mark.parametrize(
    ("evaluated", "name"),
    [
        ("runs/mine", "mine"),
        ("runs/mine/checkpoints/step-3", "step-3"),
        ("runs/mine/checkpoints/step-3/export", "step-3"),
        ("runs/yours/checkpoints/step-3", "yours-step-3"),
        ("runs/yours/checkpoints/step-3/", "yours-step-3"),
        ("s3://bucket/runs/yours/checkpoints/step-3", "yours-step-3"),
        ("models/nano", "nano"),
        ("openai", "openai"),
    ],
)
def test_checkpoints_of_other_runs_are_named_after_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, evaluated: str, name: str
) -> None:
    monkeypatch.chdir(tmp_path)
    assert default_folder(plan_of(tmp_path), evaluated) == Path("runs/mine/eval") / name


def test_a_checkpoint_at_the_url_of_the_run_is_its_own(tmp_path: Path) -> None:
    plan = plan_of(tmp_path, out="s3://bucket/runs", mirror=str(tmp_path))
    assert default_folder(plan, "s3://bucket/runs/mine/checkpoints/step-3").name == "step-3"
