"""How long a run takes to start, beside one whose processes each make their own imports."""

from __future__ import annotations

import datetime
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
BENCHMARK = "Start"
ROUNDS = 3
TRAIN = "from rlsdk.cli import main; main(sys.argv[1:])"
FORKED = f"import sys; {TRAIN}"
ALONE = f"import pathlib, sys; from rlsdk.cluster import template; template._GPU = pathlib.Path('/'); {TRAIN}"


def start(code: str, engine: str, folder: Path) -> float:
    """Return the seconds from the command to the first step."""
    began = time.time()
    settings = ("steps=1", f"engine={engine}", f"out={folder}", "eval.before=false", "eval.after=false")
    command = [sys.executable, "-c", code, "train", "examples/quickstart.yaml", "--overwrite", *settings]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    log = (folder / "quickstart" / "logs" / "driver.log").read_text()
    said = re.search(r"^(\S+ \S+),(\d+) .*training begins", log, re.MULTILINE)
    assert said is not None
    return datetime.datetime.fromisoformat(said[1]).timestamp() + int(said[2]) / 1000 - began


@pytest.mark.parametrize("engine", ["vllm", "transformers"])
def test_a_start_with_imports_made_once(
    engine: str, tmp_path: Path, show: Callable[..., None], check: Callable[..., None]
) -> None:
    seconds: dict[str, list[float]] = {FORKED: [], ALONE: []}
    for _ in range(ROUNDS):
        for code, found in seconds.items():
            found.append(start(code, engine, tmp_path))
    forked, alone = (statistics.median(found) for found in seconds.values())
    show(seconds[FORKED], engine=engine, forked=round(forked, 1), alone=round(alone, 1), ratio=round(alone / forked, 2))
    check("times as fast as imports in each process", alone / forked, case=f"`{engine}`", at_least=1.0)
