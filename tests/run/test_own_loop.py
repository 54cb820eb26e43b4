"""Scripts of docs/howto/own_loop.md on the real stack: manual steps, and a loop on the learner's primitives."""

from __future__ import annotations

import itertools
import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

pytestmark = [pytest.mark.stack, pytest.mark.slow]
EXAMPLES = Path(__file__).parents[2] / "examples" / "own_loop"

OWN = """
import json

import rlsdk
from accumulation import Accumulating
from learning_rate import LowerOnPlateau
from sampling import answers
from transformers import AutoTokenizer

class Notes(rlsdk.Callback):
    async def after_step(self, trainer, metrics):
        sums = trainer.learner.checksums()
        names = ("actor/lr", "actor/grad_norm", "actor/ratio")
        print(json.dumps({"sums": sums, **{name: metrics[name] for name in names if name in metrics}}))

if __name__ == "__main__":
    callbacks = [LowerOnPlateau(patience=0), Notes()]
    with Accumulating.from_config("config.yaml", "steps=4", "eval.after=false", callbacks=callbacks) as trainer:
        trainer.train()
        tokenizer = AutoTokenizer.from_pretrained(trainer.plan.config.model.path)
        print(json.dumps([answers(trainer, tokenizer, "3,5,17>9:", count=2, seed=seed) for seed in (1, 1, 2)]))
"""


def run(runner: Any, script: str) -> list[str]:
    """Run a script next to the configuration and the examples, with the small engine; return its output lines."""
    config = yaml.safe_load(runner.config.read_text()) | {"engine": "transformers"}
    config |= {"eval": {"limit": 8, "before": False}, "algorithm": {"use": "grpo", "kl_coef": 0.0, "filters": []}}
    runner.config.write_text(yaml.safe_dump(config))
    for example in EXAMPLES.glob("*.py"):
        shutil.copy(example, runner.folder)
    command = [sys.executable, script]
    ran = subprocess.run(command, cwd=runner.folder, capture_output=True, text=True, timeout=240, check=False)
    assert ran.returncode == 0, ran.stderr[-4000:]
    return ran.stdout.splitlines()


def test_two_steps_by_hand_then_evaluated_and_saved(runner: Any) -> None:
    first, second, accuracy, folder = run(runner, "by_hand.py")
    assert [line.split()[0] for line in (first, second)] == ["1", "2"]
    assert all(0 <= float(line.split()[1]) <= 1 for line in (first, second))
    assert "greedy" in accuracy
    saved = Path(folder) if Path(folder).is_absolute() else runner.folder / folder
    assert saved == runner.path("by_hand") / "checkpoints" / "step-2"
    assert (saved / "learner" / "actor" / "model-0.safetensors").is_file()


def test_batches_of_two_steps_are_one_optimiser_step_and_a_callback_sets_its_learning_rate(runner: Any) -> None:
    (runner.folder / "own.py").write_text(OWN)
    *lines, sampled = [json.loads(line) for line in run(runner, "own.py")]
    assert ["actor/lr" in line for line in lines] == [False, True, False, True]
    assert [line["actor/lr"] for line in lines[1::2]] == pytest.approx([1e-3, 0.5e-3])
    assert all(line["actor/grad_norm"] > 0 for line in lines[1::2])
    changed = [left["sums"] != right["sums"] for left, right in itertools.pairwise(lines)]
    assert changed == [True, False, True]
    # Both batches were sampled by the policy that the optimiser step starts from.
    assert lines[1]["actor/ratio"] == pytest.approx(1.0, abs=1e-4)
    first, again, other = sampled
    assert first == again != other
    assert all(len(each) == 2 and all(each) for each in sampled)
