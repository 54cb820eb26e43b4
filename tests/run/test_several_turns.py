"""The beginning of the multi-turn examples: success rises. docs/curves_multiturn.md has the whole runs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.stack, pytest.mark.slow]
ROOT = Path(__file__).parents[2]
GRIDWORLDS = ROOT / "plugins" / "rlsdk-gridworlds"


def train(folder: Path, example: str, *settings: str) -> dict[str, Any]:
    """Train an example as a user does, with the plugin of FrozenLake as pip would have installed it."""
    info = folder / "site" / "rlsdk_gridworlds-1.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: rlsdk-gridworlds\nVersion: 1\n")
    (info / "entry_points.txt").write_text("[rlsdk.v1]\ngridworlds = rlsdk_gridworlds\n")
    paths = [ROOT, info.parent, GRIDWORLDS, *filter(None, [os.environ.get("PYTHONPATH")])]
    command = [sys.executable, "-m", "rlsdk.cli", "train", f"examples/{example}", f"out={folder}", "name=run"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, paths))}
    ran = subprocess.run([*command, *settings], cwd=ROOT, env=environment, check=False, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr[-4000:]
    found: dict[str, Any] = json.loads((folder / "run" / "summary.json").read_text())
    return found


@pytest.mark.long
def test_frozen_lake_is_learned_in_its_environment(tmp_path: Path) -> None:
    pytest.importorskip("gymnasium")
    found = train(tmp_path, "frozen_lake_nano.yaml", "steps=20", "eval.every=0", "checkpoint.export=never", "seed=5")
    assert found["accuracy_before"]["sampled"] <= 0.4
    assert found["accuracy_after"]["sampled"] >= 0.55


def test_a_rollouts_own_calculator_is_called_more_often_where_that_pays(tmp_path: Path) -> None:
    found = train(tmp_path, "own_calculator_nano.yaml", "steps=12", "eval.every=0", "checkpoint.export=never", "seed=5")
    assert found["accuracy_before"]["sampled"] <= 0.3
    assert found["accuracy_after"]["sampled"] >= 0.8
