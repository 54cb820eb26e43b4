"""Time GRPO steps of TRL's `GRPOTrainer` in a separate environment, and print JSON.

    python trl_step.py '{"model": …, "prompts": …, "completions": …, "group": …, "max_tokens": …, "lr": …,
                         "steps": …, "threads": …, "micro_batch": …, "paged": …, "attention": …,
                         "compiled": …}'

What it prints: `seconds` and `lengths` (of completions) of each step, in order.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
import zlib
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer


class Stopwatch(TrainerCallback):
    """Seconds of each step, with generation, reward and optimiser step, but without the time between steps."""

    def __init__(self) -> None:
        self.seconds: list[float] = []

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        """The batch of prompts is there."""
        self._begin = time.perf_counter()

    def on_step_end(self, *_: Any, **__: Any) -> None:
        """The optimiser has stepped."""
        self.seconds.append(time.perf_counter() - self._begin)


def main() -> None:
    """Train, and print the times of the steps."""
    options = json.loads(sys.argv[1])
    torch.set_num_threads(options["threads"])
    lengths: list[list[int]] = []

    def reward(completions: list[str], completion_ids: list[list[int]], **_: Any) -> list[float]:
        """A hash of the text: the same rule as plugin `workload`, and every group differs in it."""
        lengths.append([len(ids) for ids in completion_ids])
        return [zlib.crc32(text.encode()) / 2**32 for text in completions]

    model, total, micro = options["model"], options["completions"], options["micro_batch"]
    watch = Stopwatch()
    with tempfile.TemporaryDirectory() as out:
        config = GRPOConfig(
            output_dir=out,
            seed=options["seed"],
            use_cpu=True,
            bf16=False,
            gradient_checkpointing=False,
            max_steps=options["steps"],
            per_device_train_batch_size=micro,
            gradient_accumulation_steps=total // micro,  # one generation, then one optimiser step
            num_generations=options["group"],
            max_completion_length=options["max_tokens"],
            learning_rate=options["lr"],
            lr_scheduler_type="constant",
            max_grad_norm=1.0,
            temperature=1.0,
            beta=0.0,
            loss_type="dapo",  # mean over tokens
            torch_compile=options["compiled"],
            use_transformers_continuous_batching=options["paged"],
            logging_strategy="no",
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
        )
        trainer = GRPOTrainer(
            model=AutoModelForCausalLM.from_pretrained(
                model, dtype=torch.float32, attn_implementation=options["attention"]
            ),
            processing_class=AutoTokenizer.from_pretrained(model),
            reward_funcs=reward,
            args=config,
            train_dataset=Dataset.from_dict({"prompt": json.loads(Path(options["prompts"]).read_text())}),
            callbacks=[watch],
        )
        trainer.train()
    print(json.dumps({"seconds": watch.seconds, "lengths": lengths}))


if __name__ == "__main__":
    main()
