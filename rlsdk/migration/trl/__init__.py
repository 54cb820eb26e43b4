"""TRL."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rlsdk.migration.rules import Framework
from rlsdk.migration.shared.tracking import KEEP_ALL
from rlsdk.migration.trl.keys import ROWS
from rlsdk.migration.trl.model import DEEPSPEED
from rlsdk.migration.trl.run import finish
from rlsdk.migration.trl.trainers import CONSTRUCTORS, OTHERS, VARIANTS

DEFAULTS: Mapping[str, Any] = {
    "trainer": "grpo",
    "output_dir": "trl-run",
    "max_completion_length": 512,
    "num_generations": 8,
    "per_device_train_batch_size": 8,
    "num_iterations": 1,
    "temperature": 1.0,
    "use_vllm": False,
    "loss_type": "dapo",
    "beta": 0.0,
    "learning_rate": 1e-6,
    "adam_beta1": 0.9,
    "lr_scheduler_type": "linear",
    "gradient_checkpointing": True,
    "bf16": True,
    "num_train_epochs": 3.0,
    "eval_on_start": False,
    "vllm_importance_sampling_correction": True,
    "save_steps": 500,
    "save_total_limit": KEEP_ALL,
    "seed": 42,
}

FRAMEWORK = Framework(
    name="trl",
    title="TRL",
    rows=ROWS,
    defaults=DEFAULTS,
    finish=finish,
    files={"deepspeed": DEEPSPEED},
    renamed={
        "evaluation_strategy": "eval_strategy",
        "peft_config.use_rslora": "use_rslora",
        "epsilon_low": "epsilon",
        "peft_config.r": "lora_r",
        "peft_config.lora_alpha": "lora_alpha",
        "peft_config.target_modules": "lora_target_modules",
        "peft_config.lora_dropout": "lora_dropout",
        "peft_config.modules_to_save": "lora_modules_to_save",
        "max_new_tokens": "max_completion_length",
        "response_length": "max_completion_length",
        "num_ppo_epochs": "num_iterations",
        "reward_model_path": "reward_model_name_or_path",
        "reward_model.argument_1": "reward_model_name_or_path",
        "reward_model.pretrained_model_name_or_path": "reward_model_name_or_path",
        "policy.argument_1": "model.argument_1",
    },
    variants=VARIANTS,
    others=OTHERS,
    entries=(
        "trl grpo",
        "trl rloo",
        "trl.scripts.grpo",
        "trl.scripts.rloo",
        "grpo.py",
        "train_grpo.py",
        "rloo.py",
        "online_dpo.py",
        "ppo/ppo.py",
        "ppo/ppo_tldr.py",
    ),
    constructors=CONSTRUCTORS,
    whole=("reward_funcs",),
)
