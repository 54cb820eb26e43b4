"""The README's promises about the quickstart."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.stack, pytest.mark.slow, pytest.mark.timeout(1500)]
ROOT = Path(__file__).parents[2]


def rlsdk(*arguments: str) -> None:
    """Run a command of the command line in the repository, as the Makefile does."""
    command = [sys.executable, "-m", "rlsdk.cli", *arguments]
    ran = subprocess.run(command, cwd=ROOT, check=False, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr[-4000:]


def summary(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "summary.json").read_text())
    return found


def test_the_quickstart_learns(tmp_path: Path) -> None:
    rlsdk("train", "examples/quickstart.yaml", f"out={tmp_path}", "seed=3")
    found = summary(tmp_path / "quickstart")
    assert found["accuracy_before"]["sampled"] <= 0.35
    assert found["accuracy_after"]["sampled"] >= 0.80
    assert found["accuracy_after"]["greedy"] >= 0.85
    assert (tmp_path / "quickstart" / "curves.png").is_file()


@pytest.mark.long
def test_the_shipped_model_can_be_made_again(tmp_path: Path) -> None:
    """The results of `make warm-start` are within 3 points of the shipped ones."""
    rlsdk("model", "new", "nano", str(tmp_path / "nano"))
    out = f"out={tmp_path}"
    rlsdk("train", "examples/warm_start/1_skill.yaml", out, f"model.path={tmp_path}/nano", "eval.after=false")
    skilled = tmp_path / "warm-start-skill" / "checkpoints" / "step-1200" / "export"
    rlsdk("train", "examples/warm_start/2_dilute.yaml", out, f"model.path={skilled}")
    shipped = ("examples/quickstart.yaml", out, "steps=1", "eval.after=false", "eval.samples=4", "save_rollouts=0")
    rlsdk("train", *shipped)
    made = summary(tmp_path / "warm-start")["accuracy_after"]["sampled"]
    assert made == pytest.approx(summary(tmp_path / "quickstart")["accuracy_before"]["sampled"], abs=0.03)
