"""XTuner (RLColocateTrainerConfig), whose configurations are Python files."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rlsdk.migration.python_values import KIND
from rlsdk.migration.rules import Framework
from rlsdk.migration.xtuner.keys import ROWS
from rlsdk.migration.xtuner.run import finish
from rlsdk.migration.xtuner.sizes import DATA, HELD_OUT, LOSS, PRODUCE, SAMPLE, TASK, WORKER

DEFAULTS: Mapping[str, Any] = {
    "work_dir": "work_dirs/xtuner-run",
    "seed": 42,
    "evaluate_step": 1,
    "enable_initial_evaluate": False,
    f"{WORKER}.optim_cfg.lr": 1e-5,
    f"{WORKER}.optim_cfg.weight_decay": 0.01,
    f"{WORKER}.lr_cfg.lr_min": 1e-6,
    f"{WORKER}.lr_cfg.warmup_ratio": 0.03,
    f"advantage_estimator_config.{KIND}": "GRPOAdvantageConfig",
    f"{LOSS}.policy_loss_cfg.loss_type": "vanilla",
    f"{LOSS}.use_kl_loss": False,
    f"{SAMPLE}.max_tokens": 2048,
    f"{TASK}.sampler_config.prompt_repeat_k": 1,
    f"{TASK}.{DATA}.tokenize_fn.max_length": 2048,
    "exp_tracker": "tensorboard",
    "checkpoint_maxkeep": -1,
}

RENAMED: Mapping[str, str] = {
    **{f"{held}agent_loop_manager_cfg.tasks.0.": f"{held}agent_loop_manager_cfg.tasks." for held in ("", "eval_")},
    **{f"{held}agent_loop_manager_cfg.{section}.": f"{held}agent_loop_manager_cfg.tasks.{section}."
       for held in ("", "eval_")
       for section in ("agent_loop_config", "judger_config", "sampler_config", "produce_strategy_config")},
    "train_worker_config.": f"{WORKER}.",
    "dataflow_config.prompt_repeat_k": f"{TASK}.sampler_config.prompt_repeat_k",
    "dataflow_config.global_batch_size": "train_batch_size",
    "dataflow_config.sample_params.": f"{SAMPLE}.",
    "dataflow_config.enable_partial_rollout": f"{PRODUCE}.enable_partial_rollout",
    "dataflow_config.tail_batch_trigger_size": f"{PRODUCE}.tail_batch_trigger_size",
    "replay_buffer_config.dataset_cfg.0.": f"{TASK}.{DATA}.",
    "judger_config.reward_judger_configs.0.": f"{TASK}.judger_config.",
    "evaluator_config.dataset_cfg.0.": f"{HELD_OUT}.{DATA}.",
    "evaluator_config.sample_params.": f"{HELD_OUT}.agent_loop_config.sample_params.",
    "evaluator_config.enable_evaluate": "enable_evaluate",
    "evaluator_config.enable_initial_evaluate": "enable_initial_evaluate",
    "evaluator_config.evaluate_step": "evaluate_step",
    "rollout_steps": "total_train_steps",
}  # fmt: skip
"""Arguments of RLTrainerConfig, up to version 1.0.1, and of managers of a single task -> today's."""

FRAMEWORK = Framework(
    name="xtuner",
    title="XTuner",
    rows=ROWS,
    defaults=DEFAULTS,
    finish=finish,
    renamed=RENAMED,
    constructors=dict.fromkeys(("RLColocateTrainerConfig", "RLDisaggregatedTrainerConfig", "RLTrainerConfig"), ()),
)
