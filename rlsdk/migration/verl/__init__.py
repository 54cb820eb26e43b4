"""veRL (verl.trainer.main_ppo), and TinyZero, its older version."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rlsdk.migration.rules import Framework
from rlsdk.migration.verl.keys import ROWS
from rlsdk.migration.verl.run import MODEL, finish
from rlsdk.migration.verl.sizes import ACTOR, ROLLOUT

DEFAULTS: Mapping[str, Any] = {
    "data.train_batch_size": 1024,
    "data.max_prompt_length": 512,
    "data.max_response_length": 512,
    "data.truncation": "error",
    f"{ROLLOUT}.name": "vllm",
    f"{ROLLOUT}.n": 1,
    f"{ROLLOUT}.tensor_model_parallel_size": 2,
    f"{ROLLOUT}.gpu_memory_utilization": 0.5,
    f"{ROLLOUT}.dtype": "bfloat16",
    f"{MODEL}.enable_gradient_checkpointing": True,
    f"{ACTOR}.ppo_mini_batch_size": 256,
    f"{ACTOR}.ppo_epochs": 1,
    f"{ACTOR}.optim.lr": 1e-6,
    f"{ACTOR}.optim.betas": [0.9, 0.999],
    f"{ACTOR}.optim.weight_decay": 0.01,
    f"{ACTOR}.optim.min_lr_ratio": 0.0,
    f"{ACTOR}.policy_loss.loss_mode": "vanilla",
    f"{ACTOR}.loss_agg_mode": "token-mean",
    f"{ACTOR}.entropy_coeff": 0.0,
    f"{ACTOR}.use_kl_loss": False,
    "critic.optim.lr": 1e-5,
    "algorithm.adv_estimator": "gae",
    "trainer.experiment_name": "verl-run",
    "trainer.total_epochs": 30,
    "trainer.n_gpus_per_node": 8,
    "trainer.nnodes": 1,
    "trainer.max_actor_ckpt_to_keep": -1,
}

FRAMEWORK = Framework(
    name="verl",
    title="veRL",
    rows=ROWS,
    defaults=DEFAULTS,
    finish=finish,
    renamed={
        "reward.custom_reward_function.path": "custom_reward_function.path",
        "reward.custom_reward_function.name": "custom_reward_function.name",
        "reward.reward_manager.name": "reward_model.reward_manager",
        "reward.reward_kwargs.": "reward_model.reward_kwargs.",
        "reward.reward_model.enable": "reward_model.enable",
        "reward.reward_model.model_path": "reward_model.model.path",
        f"{ACTOR}.policy_loss.tau_pos": f"{ACTOR}.tau_pos",
        f"{ACTOR}.policy_loss.tau_neg": f"{ACTOR}.tau_neg",
    },
    others={
        **dict.fromkeys(
            ("verl.trainer.fsdp_sft_trainer", "verl.trainer.sft_trainer", "verl.trainer.sft_trainer_ray"),
            "algorithm: sft",
        ),
        **dict.fromkeys(
            ("verl.trainer.main_generation", "verl.trainer.main_generation_server"),
            "tasks.eval, and run `rlsdk eval`",
        ),
    },
    entries=("verl.trainer.main_ppo", "main_ppo.py", "verl.trainer.main", "main_dapo", "fully_async_main"),
)
