"""TRL's trainers other than GRPO: their defaults, their keys, and the parts of an algorithm that they choose."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rlsdk.migration.rows import changed, ignored, missing, part, same, table, unless
from rlsdk.migration.rules import Given, KeyOutcome
from rlsdk.migration.shared.learner import kl_penalty
from rlsdk.migration.values import UnfitError, choice, count, number, numbers, text, two

TRAINERS = ("grpo", "rloo", "async_grpo", "gmpo", "online_dpo", "ppo")
_WITHOUT_CORRECTION = {"vllm_importance_sampling_correction": False}
VARIANTS: Mapping[str, Mapping[str, Any]] = {
    "AsyncGRPO": {
        "trainer": "async_grpo",
        "max_completion_length": 2048,
        "lr_scheduler_type": "constant",
        "use_vllm": True,
        "vllm_mode": "server",
        "max_staleness": 4,
        "weight_sync_steps": 1,
        **_WITHOUT_CORRECTION,
    },
    "GMPO": {"trainer": "gmpo", "epsilon": 0.4},
    **{
        name: {"trainer": "rloo", "beta": 0.05, "num_generations": 2, **_WITHOUT_CORRECTION}
        for name in ("trl rloo", "scripts.rloo", "rloo.py", "rloo_vlm.py", "RLOO")
    },
    **{
        name: {
            "trainer": "online_dpo",
            "loss_type": "sigmoid",
            "beta": 0.1,
            "num_generations": 2,
            "max_completion_length": 64,
            "max_length": 512,
            "temperature": 0.9,
            "learning_rate": 5e-7,
            "vllm_gpu_memory_utilization": 0.55,
            **_WITHOUT_CORRECTION,
        }
        for name in ("online_dpo", "OnlineDPO")
    },
    **{
        name: {
            "trainer": "ppo",
            "num_generations": 1,
            "num_iterations": 4,
            "max_completion_length": 53,
            "temperature": 0.7,
            "learning_rate": 3e-6,
            **_WITHOUT_CORRECTION,
        }
        for name in ("ppo.py", "ppo_tldr.py", "PPOConfig", "PPOTrainer")
    },
}
"""Part of a command, or a class that a script calls -> the trainer's defaults that differ from GRPO's."""
CONSTRUCTORS: Mapping[str, tuple[str, ...]] = {
    **dict.fromkeys(
        (
            *("GRPOConfig", "RLOOConfig", "AsyncGRPOConfig", "GMPOConfig", "GRPOWithReplayBufferConfig"),
            *("OnlineDPOConfig", "PPOConfig"),
        ),
        ("output_dir",),
    ),
    **dict.fromkeys(
        ("GRPOTrainer", "RLOOTrainer", "AsyncGRPOTrainer", "GMPOTrainer", "GRPOWithReplayBufferTrainer"),
        ("model", "reward_funcs", "args", "train_dataset", "eval_dataset"),
    ),
    "OnlineDPOTrainer": ("model", "ref_model", "reward_funcs", "judge", "args"),
    "PPOTrainer": ("args", "processing_class", "model", "ref_model", "reward_model", "train_dataset", "value_model"),
}
OTHERS: Mapping[str, str] = {
    **dict.fromkeys(("trl sft", "sft.py", "SFTTrainer"), "algorithm: sft"),
    **dict.fromkeys(("trl dpo", "dpo.py", "DPOTrainer"), "algorithm: dpo"),
    **dict.fromkeys(("trl kto", "kto.py", "KTOTrainer"), "algorithm: kto"),
    **dict.fromkeys(("xpo.py", "XPOTrainer", "nash_md.py", "NashMDTrainer"), "algorithm: dpo, which is online DPO"),
    **dict.fromkeys(("gkd.py", "GKDTrainer", "MiniLLMTrainer", "DistillationTrainer"), "algorithm: opd"),
    **dict.fromkeys(("gold.py", "GOLDTrainer"), "algorithm: opd, whose teacher has the same tokenizer"),
    **dict.fromkeys(("bco.py", "BCOTrainer"), "algorithm: kto"),
    **dict.fromkeys(
        ("cpo.py", "CPOTrainer", "orpo.py", "ORPOTrainer", "tpo.py", "TPOTrainer"),
        "algorithm: dpo, which learns from preferences as well",
    ),
    **dict.fromkeys(
        ("sdft.py", "SDFTTrainer", "sdpo.py", "SDPOTrainer", "ssd.py", "SSDTrainer"),
        "algorithm.policy_loss to one of your own: none of rlsdk's distils a model from itself",
    ),
    **dict.fromkeys(("prm.py", "PRMTrainer"), "reward: reward_model, for a model trained elsewhere"),
    **dict.fromkeys(
        ("trl reward", "reward_modeling.py", "RewardTrainer"), "reward: reward_model, for a model trained elsewhere"
    ),
}
"""Commands and classes that are not converted -> the setting that replaces them."""
_EOS = "rlsdk always ends an answer at the end-of-sequence token"
_OWN_STEP = "the critic has an optimiser of its own, whose steps do not depend on a factor of its loss"


def answers_per_row(given: Given) -> int:
    """Return the completions for each row of a batch, which online DPO counts in prompts and others in completions."""
    return 2 if str(given.get("trainer")) == "online_dpo" else 1


def counts_batches(given: Given) -> bool:
    """True for PPO, whose steps are batches; others count optimiser steps."""
    return str(given.get("trainer")) == "ppo"


def online_dpo(given: Given) -> KeyOutcome:
    """Return online DPO, whose pairs are two answers to a prompt."""
    beta = given.read("beta", first, 0.0)
    found = {
        "algorithm.use": "dpo",
        "algorithm.policy_loss": {"use": "dpo", **({"beta": beta} if beta else {})},
        "algorithm.shaping": own_shaping(given),
    }
    return KeyOutcome(found, "a pair whose answers earn the same is dropped; TRL prefers its first answer")


def ppo(given: Given) -> KeyOutcome:
    """Return PPO with a critic, the KL in the reward."""
    clip = given.read("cliprange", number, 0.2)
    discounts = {"gamma": given.read("gamma", number, 1.0), "lam": given.read("lam", number, 0.95)}
    found = {
        "algorithm.use": "ppo",
        "algorithm.advantage": {"use": "gae", **discounts},
        "algorithm.critic": True,
        "algorithm.policy_loss": {"use": "ppo", "clip_low": clip, "clip_high": clip, "dual_clip": None},
        "algorithm.value_clip": given.read("cliprange_value", number, 0.2),
        "algorithm.aggregate": "token-mean",
        "algorithm.shaping": own_shaping(given),
        "learner.critic_lr": given.read("learning_rate", number, 3e-6),
    }
    return KeyOutcome(found)


def own_shaping(given: Given) -> list[dict[str, Any]]:
    """Return what a trainer does to rewards before it compares them; nothing for GRPO."""
    found: list[dict[str, Any]] = []
    trainer = str(given.get("trainer"))
    if trainer in ("online_dpo", "ppo") and (penalty := given.read("missing_eos_penalty", number)):
        found.append({"use": "overlong", "buffer": 1, "penalty": penalty})
    if trainer == "rloo" and (bounds := given.read("reward_clip_range", two)):
        found.append({"use": "reward_clip", "low": bounds[0], "high": bounds[1]})
    coefficients = {"rloo": ("beta", "k1"), "ppo": ("kl_coef", str(given.get("kl_estimator", "k1")))}
    if trainer in coefficients:
        key, estimator = coefficients[trainer]
        found += kl_penalty(given.read(key, number, 0.05), estimator)
    return found


def first(value: Any) -> float:
    """Read a number, or the first of a list with one for each epoch."""
    found = numbers(value) if isinstance(value, list | tuple) else [number(value)]
    if not found:
        raise UnfitError("expected a number, got an empty list")
    return found[0]


def _minibatches(value: int, given: Given) -> KeyOutcome:
    if value == 1:
        return KeyOutcome.ignored("one, as by default")
    return KeyOutcome({}, "TRL makes one optimiser step per epoch over a batch, whatever their number: set minibatches")


def _episodes(value: int, given: Given) -> KeyOutcome:
    if not counts_batches(given):
        return KeyOutcome.ignored("of PPO")
    rows = given.whole("per_device_train_batch_size", 8) * given.whole("gradient_accumulation_steps")
    batch = rows * given.whole("num_processes")
    return KeyOutcome({"steps": max(1, -(-value // batch))}, f"in batches of {batch} episodes")


def _reference(value: str, given: Given) -> Mapping[str, Any] | KeyOutcome:
    policy = [given.get(key) for key in ("model", "model.argument_1", "model_name_or_path", "sft_model_path")]
    if value in policy:
        return KeyOutcome.ignored("the reference is model.path, as by default")
    return {"model.reference": value}


ROWS = table(
    # Online DPO
    part("max_length", "model.max_length max_prompt_tokens", count, 512, "prompt and answer together"),
    part("missing_eos_penalty", "algorithm.shaping", number, 1.0,
        "overlong: the penalty of an answer of the greatest length"),
    missing("judge.** judge",
        "reward: judge scores each answer by a served model, and algorithm: dpo takes the better one"),
    (ignored(f"{name} {name}.**", "tokenizers are read from the folders of the models")
     for name in ("processing_class", "reward_processing_class", "reward_processing_classes", "reward_tokenizer",
                  "tokenizer")),
    # PPO
    same("ref_model.argument_1 ref_model.pretrained_model_name_or_path", "model.reference", text, "o/reference",
        _reference),
    ignored("ref_model.**", "the reference has the settings of model"),
    same("value_model.argument_1 value_model.pretrained_model_name_or_path", "model.critic", text, "o/reward-model"),
    ignored("value_model.**", "the critic has the settings of model"),
    ignored("reward_model.**", "scoring decides where and how a reward model runs"),
    changed("num_mini_batches", "minibatches", count, 1, "optimiser steps", _minibatches),
    changed("total_episodes", "steps", count, 10000, "in batches", _episodes),
    part("cliprange", "algorithm.policy_loss", number, 0.2),
    part("cliprange_value", "algorithm.value_clip", number, 0.2),
    part("gamma", "algorithm.advantage.gamma", number, 1.0),
    part("lam", "algorithm.advantage.lam", number, 0.95),
    part("kl_coef", "algorithm.shaping", number, 0.05),
    part("kl_estimator", "algorithm.shaping", choice(("k1", "k3"), "the estimator"), "k1"),
    ignored("vf_coef", _OWN_STEP),
    unless("whiten_rewards", (False,), "algorithm.shaping: [reward_norm] normalises the rewards of answers", True),
    ignored("stop_token stop_token_id", _EOS),
    ignored("world_size num_total_batches micro_batch_size local_batch_size local_mini_batch_size "
        "mini_batch_size", "computed from the sizes of batches"),
    ignored("local_rollout_forward_batch_size", "learner.micro_batch_tokens"),
    ignored("num_sample_generations", "`rlsdk rollouts RUN` shows the samples"),
    ignored("model_adapter_name ref_adapter_name",
        "learner.lora trains one adapter; the reference is the model without it"),
    ignored("dataset_num_proc", "tasks are read on demand"),
    # GRPO with a buffer
    missing("replay_buffer_size",
        "algorithm.filters: [nonzero_variance] with rollout.dynamic_sampling: true samples other groups in "
        "place of those of equal rewards"),
)  # fmt: skip
