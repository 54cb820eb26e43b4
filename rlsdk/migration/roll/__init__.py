"""ROLL."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rlsdk.migration.roll.keys import ROWS
from rlsdk.migration.roll.run import finish
from rlsdk.migration.roll.sizes import INFER, TRAIN
from rlsdk.migration.rules import Framework

DEFAULTS: Mapping[str, Any] = {
    "exp_name": "roll-run",
    "seed": 42,
    "max_steps": 500,
    "save_steps": 50,
    "max_ckpt_to_keep": 0,
    "eval_steps": 10,
    "rollout_batch_size": 128,
    "prompt_length": 1024,
    "num_gpus_per_node": 8,
    "num_nodes": 1,
    "ppo_epochs": 1,
    "max_grad_norm": 1.0,
    "gamma": 1.0,
    "lambd": 0.95,
    "pg_clip": 0.2,
    "adv_estimator": "gae",
    "use_kl_loss": False,
    "entropy_loss_coef": 0.0,
    "loss_agg_mode": "seq-mean-token-mean",
    f"{TRAIN}.training_args.learning_rate": 5e-5,
    f"{TRAIN}.training_args.weight_decay": 0.0,
    f"{TRAIN}.training_args.adam_beta1": 0.9,
    f"{TRAIN}.training_args.lr_scheduler_type": "linear",
    f"{TRAIN}.training_args.per_device_train_batch_size": 8,
    f"{INFER}.generating_args.temperature": 0.95,
    f"{INFER}.generating_args.top_p": 0.7,
    f"{INFER}.generating_args.top_k": 50,
    f"{INFER}.strategy_args.strategy_name": "vllm",
}

FRAMEWORK = Framework(
    name="roll",
    title="ROLL",
    rows=ROWS,
    defaults=DEFAULTS,
    finish=finish,
    renamed={"student_train.": f"{TRAIN}.", "student_infer.": f"{INFER}."},
    others={
        "sft_train": "algorithm: sft",
        **dict.fromkeys(("student_pretrain", "teacher_pretrain"), "algorithm: opd"),
        **dict.fromkeys(
            ("chosen_key", "rejected_key"),
            "algorithm: dpo with rollouts: demonstrations, and rename the two columns to chosen and rejected",
        ),
    },
    entries=("start_rlvr_pipeline", "start_agentic_pipeline", "start_onpolicy_distill_pipeline"),
)
