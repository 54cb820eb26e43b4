"""Batches, steps and learning rates of XTuner."""

from __future__ import annotations

from typing import Any

from rlsdk.migration.rules import Given, KeyOutcome
from rlsdk.migration.shared.learner import share_of_steps
from rlsdk.migration.shared.tracking import KEEP_ALL

WORKER, LOSS = "train_worker_cfg", "train_worker_cfg.loss_cfg"
TASK, HELD_OUT = "agent_loop_manager_cfg.tasks", "eval_agent_loop_manager_cfg.tasks"
ANSWER_LIMIT = "agent_loop_config.sample_params.max_tokens"
SAMPLE = f"{TASK}.agent_loop_config.sample_params"
PRODUCE = f"{TASK}.produce_strategy_config"
DATA = "sampler_config.dataloader_cfg.dataset_config_list.0"
PROMPT_LIMIT = f"{DATA}.tokenize_fn.max_length"


def warmup(value: float, given: Given) -> KeyOutcome:
    steps = given.whole("total_train_steps", 0) * given.whole(f"{WORKER}.optimizer_steps")
    return share_of_steps(steps or None, value)


def exported(value: int, given: Given) -> dict[str, Any]:
    if not value:
        return {}
    kept = given.whole("hf_max_keep", -1)
    alone = {"checkpoint.every": value, "checkpoint.keep": kept if kept > 0 else KEEP_ALL}
    return {"checkpoint.export": "every", **({} if given.whole("checkpoint_interval", -1) > 0 else alone)}
