"""OpenRLHF (openrlhf.cli.train_ppo_ray)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rlsdk.migration.openrlhf.keys import ROWS
from rlsdk.migration.openrlhf.run import finish
from rlsdk.migration.rules import Framework

RENAMED: Mapping[str, str] = {
    **{f"{role}_num_{kind}": f"{role}.num_{kind}"
       for role in ("actor", "critic", "ref", "reward") for kind in ("nodes", "gpus_per_node")},
    # A section was put before these,
    **{name: f"{section}.{name}" for section, names in {
        "train": "agent_func_path colocate_actor_ref colocate_critic_reward async_queue_size enable_ema ema_beta "
            "num_episodes max_epochs seed",
        "vllm": "enable_prefix_caching enforce_eager",
        "ds": "zero_stage deepcompile zpg adam_offload use_liger_kernel grad_accum_dtype overlap_comm "
            "packing_samples load_in_4bit ring_attn_size value_head_prefix",
        "data": "disable_fast_tokenizer prompt_max_len max_len max_samples prompt_split input_key label_key "
            "input_template apply_chat_template",
        "rollout": "vllm_generate_batch_size top_p temperature n_samples_per_prompt",
        "actor": "max_norm eps_clip eps_clip_low_high dual_clip policy_loss_type lr_warmup_ratio lr_scheduler "
            "aux_loss_coef",
        "critic": "value_clip save_value_network",
        "algo.advantage": "lambd gamma",
        "reward": "overlong_buffer_len overlong_penalty_factor",
    }.items() for name in names.split()},
    # and these began with the name of their section.
    **{f"{section.rpartition('.')[2]}_{name}": f"{section}.{name}" for section, names in {
        "vllm": "num_engines tensor_parallel_size gpu_memory_utilization sync_backend sync_with_ray enable_sleep",
        "eval": "steps dataset split temperature n_samples_per_prompt",
        "ds.lora": "rank alpha dropout",
        "train": "batch_size max_tokens_per_gpu",
        "algo.kl": "target horizon estimator",
        "logger.wandb": "org group project run_name",
    }.items() for name in names.split()},
    "pretrain": "actor.model_name_or_path",
    "critic_pretrain": "critic.model_name_or_path",
    "reward_pretrain": "reward.model_name_or_path",
    "remote_rm_url": "reward.remote_url",
    "colocate_all_models": "train.colocate_all",
    "async_train": "train.async_enable",
    "partial_rollout": "train.partial_rollout_enable",
    "save_path": "ckpt.output_dir",
    "save_hf_ckpt": "ckpt.save_hf",
    "disable_ds_ckpt": "ckpt.disable_ds",
    "max_ckpt_num": "ckpt.max_num",
    "max_ckpt_mem": "ckpt.max_mem",
    "load_checkpoint": "ckpt.load_enable",
    "use_ds_universal_ckpt": "ds.use_universal_ckpt",
    "gradient_checkpointing": "actor.gradient_checkpointing_enable",
    "gradient_checkpointing_use_reentrant": "actor.gradient_checkpointing_reentrant",
    "deepspeed_enable_sleep": "ds.enable_sleep",
    "micro_rollout_batch_size": "rollout.micro_batch_size",
    "generate_max_len": "rollout.max_new_tokens",
    "l2": "actor.adam.weight_decay",
    "micro_train_batch_size": "train.micro_batch_size",
    "use_dynamic_batch": "train.dynamic_batch_enable",
    "normalize_reward": "reward.normalize_enable",
    "full_determinism": "train.full_determinism_enable",
    "freezing_actor_steps": "critic.freezing_steps",
    "actor_learning_rate": "actor.adam.lr",
    "critic_learning_rate": "critic.adam.lr",
    "init_kl_coef": "algo.kl.init_coef",
    "use_kl_loss": "algo.kl.use_loss",
    "entropy_loss_coef": "actor.entropy_coef",
    "no_advantage_std_norm": "algo.advantage.no_std_norm",
    "ring_head_stride": "ds.ring_attn_head_stride",
    "ref_reward_offload": "ref.offload",
    "prompt_data": "data.prompt_dataset",
    "prompt_data_probs": "data.prompt_probs",
    "use_wandb": "logger.wandb.key",
    "use_tensorboard": "logger.tensorboard_dir",
    "dynamic_filtering": "algo.dynamic_filtering_enable",
    "dynamic_filtering_reward_range": "algo.dynamic_filtering_range",
    "enable_vllm_is_correction": "algo.advantage.is_correction_enable",
    "vllm_is_truncated_threshold": "algo.advantage.is_correction_threshold",
    "ckpt_path": "ckpt.path",
    "ds_tensor_parallel_size": "ds.tensor_parallel_size",
    "rollout_batch_size": "rollout.batch_size",
    "adam_betas": "actor.adam.betas",
    "reward_clip_range": "reward.clip_range",
    "advantage_estimator": "algo.advantage.estimator",
    "save_steps": "ckpt.save_steps",
    "logging_steps": "logger.logging_steps",
    "target_modules": "ds.lora.target_modules",
}  # fmt: skip
"""Flags of versions up to 0.9 -> today's."""

DEFAULTS: Mapping[str, Any] = {
    "algo.advantage.estimator": "gae",
    "actor.policy_loss_type": "ppo",
    "actor.num_nodes": 1,
    "actor.num_gpus_per_node": 8,
    "actor.adam.lr": 1e-6,
    "critic.adam.lr": 9e-6,
    "actor.adam.betas": [0.9, 0.95],
    "actor.lr_scheduler": "cosine_with_min_lr",
    "actor.min_lr_ratio": 0.1,
    "actor.lr_warmup_ratio": 0.03,
    "rollout.batch_size": 1024,
    "rollout.n_samples_per_prompt": 1,
    "train.batch_size": 128,
    "train.micro_batch_size": 1,
    "train.num_episodes": 1,
    "train.max_epochs": 1,
    "train.seed": 42,
    "eval.n_samples_per_prompt": 4,
    "eval.temperature": 0.6,
    "ckpt.max_num": 3,
    "ds.zero_stage": 2,
    "ds.param_dtype": "bf16",
    "logger.wandb.run_name": "openrlhf-run",
}

FRAMEWORK = Framework(
    name="openrlhf",
    title="OpenRLHF",
    rows=ROWS,
    defaults=DEFAULTS,
    finish=finish,
    renamed=RENAMED,
    others={
        "openrlhf.cli.train_sft": "algorithm: sft",
        "openrlhf.cli.train_dpo": "algorithm: dpo",
        "openrlhf.cli.train_kto": "algorithm: kto",
        "openrlhf.cli.train_rm": "reward: reward_model, for a model trained elsewhere",
    },
    entries=("openrlhf.cli.train_ppo_ray", "openrlhf.cli.train_ppo", "train_ppo_ray.py"),
)
