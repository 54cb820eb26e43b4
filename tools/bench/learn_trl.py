"""Train with TRL for `make bench-peers`, in TRL's own environment.

    python learn_trl.py FOLDER    # reads work.json and own.json; writes found.json and a model for each point

A batch is one generation with its optimiser steps. Its time is measured between `on_step_begin` and `on_step_end` of
these steps, without logging and saving.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import facts
import torch
from datasets import Dataset
from shared_reward import countdown
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer


class Curve(TrainerCallback):
    """Records seconds, tokens and mean reward of each batch, and saves a model at each point."""

    def __init__(self, work: dict[str, Any], folder: Path, tokenizer: Any) -> None:
        self.steps: list[dict[str, float]] = []
        self.points: dict[int, str] = {}
        self.tokens, self.reward = 0, 0.0
        self._work, self._folder, self._tokenizer, self._seconds = work, folder, tokenizer, 0.0

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        """Start the timer when the prompts are ready."""
        self._begin = time.perf_counter()

    def on_step_end(self, _: Any, state: Any, __: Any, model: Any, **___: Any) -> None:
        """Record a batch after its last optimiser step."""
        self._seconds += time.perf_counter() - self._begin
        if state.global_step % self._work["minibatches"]:
            return
        self.steps.append({"seconds": self._seconds, "tokens": self.tokens, "reward": self.reward})
        self._seconds = 0.0
        batch = len(self.steps)
        if batch % self._work["every"] == 0 or batch == self._work["steps"]:
            self.points[batch] = str(self._folder / f"point-{batch}")
            model.save_pretrained(self.points[batch])
            self._tokenizer.save_pretrained(self.points[batch])


def settings(work: dict[str, Any], own: dict[str, Any], folder: Path) -> GRPOConfig:
    """Return TRL's settings; each line corresponds to one in the page's table of equal settings."""
    minibatch = work["tasks"] * work["group"] // work["minibatches"]
    micro = own["micro_batch"] or minibatch
    return GRPOConfig(
        output_dir=str(folder / "out"),
        seed=work["seed"],
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        max_steps=work["steps"] * work["minibatches"],
        per_device_train_batch_size=micro,
        gradient_accumulation_steps=minibatch // micro,
        steps_per_generation=work["minibatches"] * minibatch // micro,
        num_generations=work["group"],
        num_iterations=1,
        shuffle_dataset=False,
        max_completion_length=work["max_tokens"],
        temperature=work["temperature"],
        learning_rate=work["lr"],
        lr_scheduler_type="polynomial",  # power 1: linear decay to lr_end
        lr_scheduler_kwargs={"lr_end": work["lr"] * work["final_ratio"], "power": 1.0},
        warmup_steps=work["warmup"],
        adam_beta1=work["betas"][0],
        adam_beta2=work["betas"][1],
        adam_epsilon=1e-8,
        weight_decay=0.0,
        max_grad_norm=work["grad_clip"],
        epsilon=work["clip"],
        beta=0.0,
        loss_type="dapo",  # mean over tokens
        scale_rewards="group",
        disable_dropout=True,
        torch_compile=own["compile"],
        use_transformers_continuous_batching=own["paged"],
        logging_strategy="no",
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )


def main() -> None:
    """Train, and write the results."""
    folder = Path(sys.argv[1])
    work, own = (json.loads((folder / name).read_text()) for name in ("work.json", "own.json"))
    torch.set_num_threads(own["threads"])
    rows = [json.loads(line) for line in Path(work["train"]).read_text().splitlines()]
    tokenizer = AutoTokenizer.from_pretrained(work["model"])
    curve = Curve(work, folder, tokenizer)

    def reward(completions: list[str], completion_ids: list[list[int]], **answers: Any) -> list[float]:
        goals = zip(completions, answers["target"], answers["numbers"], strict=True)
        found = [countdown(text, target, numbers) for text, target, numbers in goals]
        curve.tokens, curve.reward = sum(map(len, completion_ids)), sum(found) / len(found)
        return found

    trainer = GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(
            work["model"], dtype=torch.float32, attn_implementation=own["attention"]
        ),
        processing_class=tokenizer,
        reward_funcs=reward,
        args=settings(work, own, folder),
        train_dataset=Dataset.from_list(rows),
        callbacks=[curve],
    )
    trainer.train()
    found = {"steps": curve.steps, "points": curve.points, "versions": facts.versions()}
    (folder / "found.json").write_text(json.dumps(found), encoding="utf-8")


if __name__ == "__main__":
    main()
