"""GRPO with TRL and vLLM on the tasks, reward and sizes of `examples/countdown_gpu_day.yaml`; writes JSON lines.

`tools/gpu_day.py` runs it in a separate environment, `.venv-trl`, which contains TRL, vLLM and rlsdk without its
stack, so that the same function computes the rewards of both trainers.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    found = argparse.ArgumentParser(description=__doc__)
    found.add_argument("--model", required=True)
    found.add_argument("--tasks", type=Path, required=True, help="JSON written by `tools/gpu_day.py --tasks`")
    found.add_argument("--curve", type=Path, required=True, help="JSON lines to write")
    return found


def main() -> None:
    """Train, and write reward and seconds of each step."""
    import torch
    import yaml
    from datasets import Dataset
    from transformers import TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    import rlsdk

    given = parser().parse_args()
    config = yaml.safe_load((Path(__file__).resolve().parents[1] / "examples" / "countdown_gpu_day.yaml").read_text())
    score, rewards = rlsdk.load("reward", config["reward"]), []

    def reward(completions: list[str], prompts: list[str], answer: list[Any], **_: Any) -> list[float]:
        found = []
        for text, prompt, wanted in zip(completions, prompts, answer, strict=True):
            task = rlsdk.Task(id="0", prompt=prompt, answer=wanted)
            found.append(float(getattr(scored := score(rlsdk.Rollout.from_text(task, text)), "value", scored)))
        rewards.append(sum(found) / len(found))
        return found

    class Curve(TrainerCallback):  # type: ignore[misc]
        """Writes a line after each step."""

        def on_step_begin(self, *_: Any, **__: Any) -> None:
            self._began = time.perf_counter()

        def on_step_end(self, *_: Any, **__: Any) -> None:
            torch.cuda.synchronize()
            line = {"step": len(rewards), "reward": rewards[-1], "seconds": time.perf_counter() - self._began}
            with given.curve.open("a") as file:
                file.write(json.dumps(line) + "\n")

    given.curve.unlink(missing_ok=True)
    tasks, sampling = json.loads(given.tasks.read_text()), config["sampling"]
    size, micro = config["batch_size"] * config["group_size"], 32
    trainer = GRPOTrainer(
        model=given.model,
        reward_funcs=reward,
        args=GRPOConfig(
            output_dir=str(given.curve.with_suffix("")),
            seed=config["seed"],
            bf16=True,
            use_vllm=True,
            vllm_mode="colocate",
            vllm_gpu_memory_utilization=config["engine"]["gpu_memory_utilization"],
            generation_kwargs={"stop": sampling["stop"], "include_stop_str_in_output": True},
            max_steps=config["steps"],
            per_device_train_batch_size=micro,
            gradient_accumulation_steps=size // micro,
            num_generations=config["group_size"],
            max_completion_length=sampling["max_tokens"],
            learning_rate=config["learner"]["lr"],
            lr_scheduler_type="constant",
            temperature=sampling["temperature"],
            beta=config["algorithm"]["kl_coef"],
            loss_type="dapo",  # the mean over all tokens, as `aggregate: token-mean`
            logging_strategy="no",
            save_strategy="no",
            report_to="none",
        ),
        train_dataset=Dataset.from_list(tasks),
        callbacks=[Curve()],
    )
    trainer.train()


if __name__ == "__main__":
    sys.exit(main())
