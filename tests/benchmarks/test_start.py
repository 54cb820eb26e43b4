"""Start time of a run, compared with processes that each import their own libraries."""

from __future__ import annotations

import json
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
    """Return the seconds from the command to the first tokens that an engine has sampled and sent."""
    began = time.time()
    # With answers of one token, none of them right: the run fails since it has learned nothing, after what is measured.
    settings = ("steps=1", "eval.before=false", "eval.after=false", "sampling.max_tokens=1")
    given = ("examples/quickstart.yaml", "--overwrite", f"engine={engine}", f"out={folder}", *settings)
    command = [sys.executable, "-c", code, "train", *given]
    ran = subprocess.run(command, cwd=ROOT, check=False, capture_output=True, text=True)
    assert "nothing was learned" in ran.stderr, ran.stderr
    spans = [json.loads(line) for line in (folder / "quickstart" / "spans.jsonl").read_text().splitlines()]
    return min(end for _, name, _, end, _ in spans if name == "generate") - began


@pytest.mark.parametrize("engine", ["vllm", "transformers"])
def test_a_start_with_imports_made_once(
    engine: str, tmp_path: Path, show: Callable[..., None], check: Callable[..., None]
) -> None:
    seconds: dict[str, list[float]] = {FORKED: [], ALONE: []}
    for _ in range(ROUNDS):
        for code, found in seconds.items():
            found.append(start(code, engine, tmp_path))
    forked, alone = (statistics.median(found) for found in seconds.values())
    figures = {"forked": round(forked, 1), "alone": round(alone, 1), "ratio": round(alone / forked, 2)}
    show(seconds[FORKED], engine=engine, to="first token", **figures)
    check("times as fast as imports in each process", alone / forked, case=f"`{engine}`", at_least=1.0)
