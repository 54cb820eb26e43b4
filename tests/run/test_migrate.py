"""Two users' configurations, migrated and trained at a reduced scale."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

import rlsdk
from rlsdk.migration import migrate
from rlsdk.sources.tables import write

pytestmark = [pytest.mark.stack, pytest.mark.slow]
ROOT = Path(__file__).parents[2]
FILES = ROOT / "tests" / "migration" / "files"
MODELS = ROOT / "examples" / "models"
SMALL = [
    "engine={use: transformers}",
    "learner.micro_batch_tokens=4096",
    "learner.attention=sdpa",
    "model.dtype=float32",
    "placement={device: cpu, engine_threads: 1, learner_threads: 1}",
    "trackers=[]",
    "epochs=null",
    "steps=2",
    "checkpoint.export=never",
    "eval.limit=4",
]


GRID = {
    "template": "grid",
    "max_steps": "4",
    "action_pattern": "'[0-3]'",
    "action_lookup": "{0: '0', 1: '1', 2: '2', 3: '3'}",
    "grid_lookup": "{0: '*', 1: '-', 2: '/', 3: '+', 4: '=', 5: ':'}",
}
"""What the small model was taught to read and to answer."""


def train(folder: Path, trainer: str, file: Path, settings: list[str], environ: dict[str, str]) -> dict[str, Any]:
    """Migrate a file, and train the result."""
    config = folder / "migrated.yaml"
    config.write_text(yaml.safe_dump(migrate(trainer, [str(file)], environ).config))
    info = folder / "site" / "rlsdk_gridworlds-1.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: rlsdk-gridworlds\nVersion: 1\n")
    (info / "entry_points.txt").write_text("[rlsdk.v1]\ngridworlds = rlsdk_gridworlds\n")
    paths = [ROOT, info.parent, ROOT / "plugins" / "rlsdk-gridworlds"]
    environment = {**os.environ, **environ, "PYTHONPATH": os.pathsep.join(map(str, paths))}
    command = [sys.executable, "-m", "rlsdk.cli", "train", str(config), f"out={folder}", "name=run", *SMALL, *settings]
    ran = subprocess.run(command, cwd=folder, env=environment, check=False, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr[-4000:]
    found: dict[str, Any] = json.loads((folder / "run" / "summary.json").read_text())
    return found


def test_tinyzeros_command_trains(tmp_path: Path) -> None:
    options: dict[str, Any] = {"numbers": 3, "number_range": (1, 20), "target_range": (1, 100), "operators": "+-"}
    for split in ("train", "test"):
        tasks = rlsdk.load("tasks", "countdown", split=split, size=32, template="compact", **options)()
        write([tasks[i] for i in range(32)], tmp_path / f"{split}.parquet")
    launch = {
        "DATA_DIR": str(tmp_path),
        "BASE_MODEL": str(MODELS / "countdown-nano"),
        "N_GPUS": "2",
        "ROLLOUT_TP_SIZE": "1",
        "EXPERIMENT_NAME": "countdown",
    }
    small = ["batch_size=8", "max_prompt_tokens=16", "sampling.max_tokens=14", "model.max_length=32"]
    found = train(tmp_path, "verl", FILES / "tinyzero_train.sh", small, launch)
    assert (found["status"], found["steps"]) == ("finished", 2)


def test_rolls_pipeline_trains(tmp_path: Path) -> None:
    pytest.importorskip("gymnasium")
    environment = "environments.FrozenLake"
    levels = [
        f"{where}.{key}={value}"
        for where in (f"tasks.train.{environment}", f"tasks.eval.{environment}")
        for key, value in GRID.items()
    ]
    small = [
        *("model.path=" + str(MODELS / "frozen-lake-nano"), "model.max_length=192", "max_prompt_tokens=32"),
        *("batch_size=4", "group_size=4", "tasks.train.groups=4", "tasks.train.partition=[4]", "tasks.train.form=text"),
        *("tasks.eval.groups=4", "tasks.eval.partition=[4]", "tasks.eval.tags=[FrozenLake]", "tasks.eval.form=text"),
        *("environments.workers=1", "eval.environments.workers=1", "sampling.max_tokens=2", "workflow.max_turns=4"),
        *levels,
    ]
    found = train(tmp_path, "roll", FILES / "roll_agentic_pipeline.yaml", small, {})
    assert (found["status"], found["steps"]) == ("finished", 2)
