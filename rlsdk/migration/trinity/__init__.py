"""Trinity-RFT."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rlsdk.migration.rules import Framework
from rlsdk.migration.trinity.keys import _ROLLOUT, ROWS
from rlsdk.migration.trinity.run import VERL, finish
from rlsdk.migration.trinity.tasksets import INPUT

DEFAULTS: Mapping[str, Any] = {
    "name": "trinity-run",
    "algorithm.algorithm_type": "ppo",
    "algorithm.repeat_times": 1,
    "algorithm.loss_agg_mode": "token-mean",
    "algorithm.optimizer.lr": 1e-6,
    "algorithm.optimizer.betas": [0.9, 0.999],
    "algorithm.optimizer.weight_decay": 0.01,
    "buffer.batch_size": 1,
    "buffer.total_epochs": 1,
    "explorer.eval_interval": 100,
    f"{_ROLLOUT}.engine_type": "vllm",
    f"{_ROLLOUT}.dtype": "bfloat16",
    f"{_ROLLOUT}.gpu_memory_utilization": 0.9,
    "monitor.monitor_type": "tensorboard",
    "trainer.save_hf_checkpoint": "last",
    "trainer.max_checkpoints_to_keep": -1,
    "algorithm.bypass_old_logprobs": True,
}

RENAMED: Mapping[str, str] = {
    **{f"data.{old}": f"{INPUT}.{new}" for old, new in (
        ("dataset_path", "taskset.path"), ("train_split", "taskset.split"), ("subset_name", "taskset.subset_name"),
        ("format.", "taskset.format."), ("format_config.", "taskset.format."),
        ("default_workflow_type", "default_workflow_type"), ("default_reward_fn_type", "default_reward_fn_type"))},
    "data.total_epochs": "buffer.total_epochs",
    "data.batch_size": "buffer.batch_size",
    **{f"explorer.{name}": f"{_ROLLOUT}.{name}" for name in (
        "engine_type", "engine_num", "tensor_parallel_size", "enable_prefix_caching", "enforce_eager", "dtype",
        "temperature", "seed", "gpu_memory_utilization")},
    f"{_ROLLOUT}.enable_thinking": "model.enable_thinking",
    "explorer.repeat_times": "algorithm.repeat_times",
    "model.checkpoint_path": "checkpoint_root_dir",
    "model.max_token_len": "model.max_model_len",
    "trainer.algorithm_type": "algorithm.algorithm_type",
    "trainer.eval_interval": "explorer.eval_interval",
    "synchronizer.sync_iteration_interval": "synchronizer.sync_interval",
    "monitor.project": "project",
    "monitor.name": "name",
}  # fmt: skip
"""Keys of version 0.1 -> today's."""

FRAMEWORK = Framework(
    name="trinity",
    title="Trinity-RFT",
    rows=ROWS,
    defaults=DEFAULTS,
    finish=finish,
    renamed=RENAMED,
    files={"trainer.trainer_config_path": VERL},
    entries=("trinity run",),
)
