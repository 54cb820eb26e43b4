"""`rlsdk eval` confirms the accuracy that the run reported for a checkpoint."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.stack, pytest.mark.slow]


def test_a_checkpoint_has_the_accuracy_that_its_run_reported(runner: Any) -> None:
    short = ("engine=transformers", "steps=1", "eval.before=false", "checkpoint.export=last")
    runner.train(*short)
    command = [sys.executable, "-m", "rlsdk.cli", "eval", str(runner.config), *short]
    checkpoint = runner.path() / "checkpoints" / "step-1"
    ran = subprocess.run(
        [*command, "--checkpoint", str(checkpoint), "--json"], capture_output=True, text=True, check=False
    )
    assert ran.returncode == 0, ran.stderr
    found = json.loads(ran.stdout)
    assert found["accuracy"] == runner.summary()["accuracy_after"]
    assert found["model"] == str(checkpoint)  # also in the file: not the temporary copy that the engine loaded
    assert json.loads((Path(found["transcripts"]).parent / "evaluation.json").read_text(encoding="utf-8")) == found
    assert found["tasks"] == {"countdown": 8}
    assert found["invalid"]["rollouts"] == 0
    rows = [json.loads(line) for line in Path(found["transcripts"]).read_text(encoding="utf-8").splitlines()]
    assert [row["kind"] for row in rows] == ["greedy"] * 8 + ["sampled"] * 8
    assert all(row["messages"][-1]["role"] == "assistant" and any(row["loss_mask"]) for row in rows)
    again = subprocess.run([*command, "--checkpoint", str(checkpoint)], capture_output=True, text=True, check=False)
    assert again.returncode == 2
    assert "is not empty" in again.stderr
    every = [sys.executable, "-m", "rlsdk.cli", "train", str(runner.config), *short, "--mode", "bench", "--json"]
    ran = subprocess.run(every, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    first, last = json.loads(ran.stdout)
    assert (first["step"], last["step"]) == (0, 1)
    assert last["accuracy"] == found["accuracy"]
    assert Path(last["transcripts"]).is_file()


@pytest.mark.parametrize(
    ("engine", "cuts"), [("transformers", {"eval.top_p=1e-6": True, "eval.top_k=0": False}), ("vllm", {})]
)
def test_answers_sampled_from_the_likeliest_token_are_the_greedy_ones(
    runner: Any, engine: str, cuts: dict[str, bool]
) -> None:
    short = (f"engine={engine}", "steps=1", "eval.samples=2", "rollout.workers=1", "eval.temperature=0.6")
    runner.train(*short, "eval.top_k=1", "eval.after=false", "name=likeliest")
    accuracy = runner.summary("likeliest")["accuracy_before"]
    assert accuracy["sampled"] == accuracy["pass@2"] == accuracy["greedy"]
    command = [sys.executable, "-m", "rlsdk.cli", "eval", str(runner.config), *short, "eval.greedy=false", "--json"]
    for cut, same in cuts.items():
        out = str(runner.path(cut))
        ran = subprocess.run([*command, cut, "--out", out], capture_output=True, text=True, check=False)
        assert ran.returncode == 0, ran.stderr
        assert json.loads(ran.stdout)["accuracy"].keys() == {"sampled", "pass@2"}
        rows = [json.loads(line) for line in Path(out, "transcripts.jsonl").read_text(encoding="utf-8").splitlines()]
        assert [row["kind"] for row in rows] == ["sampled"] * 16
        tokens = [row["token_ids"] for row in rows]
        assert (tokens[::2] == tokens[1::2]) == same  # two samples of each task
