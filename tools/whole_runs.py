"""Whole runs on tiny random models: three steps, an export, a resumed step; for `tools/architectures.py --train`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import yaml
from curves import ROOT

sys.path.insert(0, str(ROOT))
from tests.architectures import make

STEPS = 3
SECONDS = 1200
REWARD = '''
import rlsdk


@rlsdk.reward("even")
def even(rollout):
    """The share of even tokens: it differs between the answers of a random model."""
    return float((rollout.token_ids[rollout.loss_mask] % 2 == 0).mean())
'''
CONFIG: dict[str, Any] = {
    "name": "run",
    "tasks": {"train": {"use": "countdown", "numbers": 3, "template": "compact", "size": 200}},
    "max_prompt_tokens": 16,
    "reward": "whole_runs_lab/even",
    "algorithm": {"use": "grpo", "kl_coef": 0.0},
    "sampling": {"max_tokens": 10},
    "steps": STEPS,
    "batch_size": 4,
    "group_size": 4,
    "learner": {"use": "deepspeed", "lr": 3.0e-3},
    "placement": {"engine_threads": 1, "learner_threads": 1},
}


def whole_run(name: str, head: str, dtype: str, engine: str) -> dict[str, float]:
    """Train a model for three steps, open its export with transformers, and resume for a fourth step.

    The run's canary compares engine and learner after each sync, and ends the run above its tolerance.

    Returns:
        `gap`: largest gap that the canary measured. `moved`: largest change of logprobs of fixed tokens from the
        folder's weights to the export's.

    Raises:
        RuntimeError: A run failed, or its export does not match the model.
    """
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        make(folder / "model", name, tied=head == "tied", dtype=dtype)
        (folder / "whole_runs_lab.py").write_text(REWARD)
        config = {**CONFIG, "out": str(folder), "engine": {"use": engine}}
        config["model"] = {"path": str(folder / "model"), "dtype": dtype, "max_length": 32}
        config["plugins"] = [str(folder / "whole_runs_lab.py")]
        if name == "gpt-oss":  # transformers has no `sdpa` attention for it
            config["learner"] = {**config["learner"], "attention": "eager"}
        (folder / "config.yaml").write_text(yaml.safe_dump(config))
        summary = _train(folder)
        moved = _moved(str(folder / "model"), summary["export"])
        _train(folder, f"steps={STEPS + 1}", "--resume")
        lines = [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]
    steps = [line for line in lines if "actor/grad_norm" in line]
    if len(steps) != STEPS + 1 or not all(line["actor/grad_norm"] > 0 for line in steps):
        raise RuntimeError(f"{len(steps)} of {STEPS + 1} steps trained: {steps}")
    gap = max(line["canary/gap"] for line in lines if "canary/gap" in line)
    return {"gap": gap, "moved": moved}


def _train(folder: Path, *arguments: str) -> dict[str, Any]:
    command = [sys.executable, "-m", "rlsdk.cli", "train", str(folder / "config.yaml"), *arguments]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, check=False)
    if ran.returncode:
        said = [line for line in ran.stderr.splitlines() if "rror" in line or "refus" in line]
        raise RuntimeError((said or ran.stderr.splitlines() or ["no message"])[-1].strip())
    summary: dict[str, Any] = json.loads((folder / "run" / "summary.json").read_text())
    return summary


def _moved(before: str, after: str) -> float:
    """Open both models with transformers, compare their tensors, and return the largest change of logprobs."""
    import torch
    from transformers import AutoModelForCausalLM

    from rlsdk.conversion import read_header

    if read_header(before) != read_header(after):
        raise RuntimeError("the names or shapes of the export's tensors differ from the model's")
    ids = torch.randint(3, 100, (1, 24), generator=torch.Generator().manual_seed(0))
    scores = []
    for path in (before, after):
        model, info = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, output_loading_info=True)
        if wrong := [key for key in ("missing_keys", "unexpected_keys", "mismatched_keys") if info[key]]:
            raise RuntimeError(f"transformers opens {path} with {', '.join(wrong)}")
        with torch.no_grad():
            scores.append(model(ids).logits.float().log_softmax(-1))
    return float((scores[1] - scores[0]).abs().max())


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    print(json.dumps(whole_run(*sys.argv[1:5])))
