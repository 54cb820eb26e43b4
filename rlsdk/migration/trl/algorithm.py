"""Batches, steps, learning rates, advantages, losses and KL of TRL."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rlsdk.migration.rules import Given, KeyOutcome
from rlsdk.migration.shared.learner import ZOO, minibatches, share_of_steps
from rlsdk.migration.trl.rewards import normalises_parts
from rlsdk.migration.trl.trainers import answers_per_row, counts_batches, online_dpo, own_shaping, ppo
from rlsdk.migration.values import Choice, UnfitError, flag, number, numbers

STRATEGY = Choice({"no": "no", "false": "no", "steps": "steps", "epoch": "epoch", "best": "best"}, "the strategy")
"""When something is done; YAML reads a plain `no` as false."""


def learner_gpus(given: Given) -> int:
    return given.whole("num_processes")


def rollouts_per_step(given: Given) -> int:
    """Completions that are generated at once."""
    explicit = given.whole("generation_batch_size", 0)
    accumulated = given.whole("gradient_accumulation_steps")
    return explicit or _on_all_ranks(given) * given.whole("steps_per_generation", accumulated)


def rollouts_per_update(given: Given) -> int:
    """Completions of one optimiser step."""
    return _on_all_ranks(given) * given.whole("gradient_accumulation_steps")


def _on_all_ranks(given: Given) -> int:
    """Completions of one micro-batch of all ranks."""
    return given.whole("per_device_train_batch_size", 8) * answers_per_row(given) * learner_gpus(given)


def updates_per_step(given: Given) -> int:
    """TRL's steps in one of rlsdk's."""
    if counts_batches(given):
        return 1
    return minibatches(rollouts_per_step(given), rollouts_per_update(given)) * given.whole("num_iterations")


def prompt_length(given: Given) -> int:
    """Maximum tokens of a prompt, for which today's TRL has no option."""
    both = given.whole("vllm_max_model_length", 0) or given.whole("max_length", 0)
    whole_length = both - given.whole("max_completion_length", 512)
    return given.whole("max_prompt_length", 0) or (whole_length if whole_length > 0 else 512)


def context_length(given: Given) -> int:
    return prompt_length(given) + given.whole("max_completion_length", 512)


def evaluates(given: Given) -> bool:
    return bool(given.read("eval_strategy", STRATEGY, "no") != "no")


def batch(value: int, given: Given) -> KeyOutcome:
    group = given.whole("num_generations", 8)
    values = {
        "batch_size": max(1, rollouts_per_step(given) // group),
        "minibatches": minibatches(rollouts_per_step(given), rollouts_per_update(given)),
        "learner.micro_batch_tokens": value * context_length(given),
        "placement.learners": learner_gpus(given),
    }
    note = "TRL counts completions per rank, rlsdk tasks per step: completions / num_generations, over all ranks"
    return KeyOutcome(values, note)


def epochs(value: float, given: Given) -> KeyOutcome:
    if given.whole("total_episodes", 0) > 0 and counts_batches(given):
        return KeyOutcome.ignored("total_episodes takes precedence")
    if given.whole("max_steps", -1) > 0:
        return KeyOutcome.ignored("max_steps takes precedence")
    return KeyOutcome({"epochs": value})


def given_steps(value: int, given: Given) -> KeyOutcome:
    if counts_batches(given):
        return KeyOutcome.ignored("PPO takes total_episodes, or num_train_epochs")
    if value <= 0:
        return KeyOutcome.ignored("off; num_train_epochs takes precedence")
    return KeyOutcome(
        {"steps": max(1, value // updates_per_step(given))},
        f"TRL counts optimiser steps; a step of rlsdk has {updates_per_step(given)} of them",
    )


def warmup(value: float, given: Given) -> KeyOutcome:
    if 0 < value < 1:
        return share_of_steps(given.whole("max_steps", 0) or None, value)
    if counts_batches(given):
        epochs = given.whole("num_iterations")
        return KeyOutcome({"learner.warmup_steps": int(value) * epochs}, f"TRL counts batches, of {epochs} steps each")
    return KeyOutcome({"learner.warmup_steps": int(value)})


def warmup_ratio(value: float, given: Given) -> KeyOutcome:
    if given.read("warmup_steps", number, 0.0):
        return KeyOutcome.ignored("warmup_steps takes precedence")
    steps = given.whole("max_steps", 0)
    return share_of_steps(steps if steps > 0 else None, value)


def every(to: str, strategy: str) -> Any:
    """Steps between two events, which a strategy may turn off."""

    def give(value: float, given: Given) -> KeyOutcome:
        chosen = given.read(strategy, STRATEGY, "steps")
        if chosen == "no":
            return KeyOutcome({to: 0}, f"{strategy}: no", "mapped")
        if chosen != "steps":
            return KeyOutcome.missing(f"{strategy} is {chosen}: set {to}, which counts steps")
        if 0 < value < 1:
            return KeyOutcome.missing(f"a share of the steps: set {to}")
        return KeyOutcome(
            {to: max(1, int(value) // updates_per_step(given))},
            f"TRL counts optimiser steps; a step of rlsdk has {updates_per_step(given)} of them",
        )

    return give


LOSSES: Mapping[str, str] = {
    "grpo": "seq-mean-token-mean",
    "dapo": "token-mean",
    "bnpo": "token-mean",
    "dr_grpo": "seq-mean-token-sum-norm",
    "cispo": "token-mean",
    "sapo": "seq-mean-token-mean",
    "luspo": "seq-mean-token-sum",
    "vespo": "token-mean",
}
"""`loss_type` -> the aggregation."""
VESPO: Mapping[str, tuple[str, float]] = {
    "power_pos": ("k_pos", 2.0),
    "decay_pos": ("lambda_pos", 3.0),
    "power_neg": ("k_neg", 3.0),
    "decay_neg": ("lambda_neg", 2.0),
}
"""Option of the loss zoo/vespo -> its name in TRL, and its default."""


def estimator(kind: str, given: Given) -> Mapping[str, Any] | KeyOutcome:
    if kind in ("online_dpo", "ppo"):
        return online_dpo(given) if kind == "online_dpo" else ppo(given)
    if kind == "async_grpo":  # whose ratio is that to the engine's policy
        return {"old_logprobs": "rollout", **_group_relative(given)}
    if kind == "rloo":
        whitened = given.read("normalize_advantages", flag, False)
        values: dict[str, Any] = {"algorithm.use": "rloo", "algorithm.advantage": "rloo"}
        return {**values, **({"algorithm.whiten_advantages": True} if whitened else {})}
    return _group_relative(given)


def _group_relative(given: Given) -> dict[str, Any]:
    if normalises_parts(given):
        return {"algorithm.use": "gdpo", "algorithm.advantage": "gdpo"}
    scale = str(given.get("scale_rewards", "group")).lower()
    over = {"std_over": "batch"} if scale == "batch" else {}
    normalise = scale not in ("none", "false")
    return {"algorithm.use": "grpo", "algorithm.advantage": {"use": "grpo", "std_normalize": normalise, **over}}


def loss(kind: str, given: Given) -> Mapping[str, Any] | KeyOutcome:
    if (trainer := str(given.get("trainer"))) == "ppo":
        return {}
    if trainer == "online_dpo":
        if kind != "sigmoid":
            raise UnfitError(f"the loss of online DPO is sigmoid; {kind} has no counterpart: write a policy loss")
        return {}
    if kind not in LOSSES:
        raise UnfitError(f"{kind} is a loss of online DPO")
    low = given.read("epsilon", number, 0.2)
    high = given.read("epsilon_high", number, low)
    values: dict[str, Any] = {"algorithm.aggregate": LOSSES[kind]}
    bounds = {"clip_low": low, "clip_high": high}
    if trainer == "gmpo":
        loss = {"use": "geo_mean", **bounds, "dual_clip": None}
        return {"algorithm.policy_loss": loss, "algorithm.aggregate": "seq-mean-token-mean"}
    if trainer == "rloo":  # its ratio is that of the whole answer, whose first gradient is the same
        return {
            "algorithm.aggregate": "seq-mean-token-sum",
            "algorithm.policy_loss": {"use": "ppo", **bounds, "dual_clip": None},
        }
    # sequence_token has the same gradient as sequence, since the tokens of an answer share its advantage
    whole_answer = str(given.get("importance_sampling_level")) in ("sequence", "sequence_token")
    if kind == "vespo":
        options = {to: given.read(f"vespo_{key}", number, usual) for to, (key, usual) in VESPO.items()}
        values["algorithm.policy_loss"] = {"use": "zoo/vespo", **options}
        return KeyOutcome(values, ZOO)
    if kind == "cispo":
        # TRL's epsilon_high is the greatest ratio itself, rlsdk's clip_high its distance from 1
        values["algorithm.policy_loss"] = {"use": "cispo", "clip_low": 1.0, "clip_high": max(0.0, high - 1)}
    elif kind == "sapo":
        names = {"tau_pos": "sapo_temperature_pos", "tau_neg": "sapo_temperature_neg"}
        temperatures = {to: given.read(key, number, 1.05 if to == "tau_neg" else 1.0) for to, key in names.items()}
        values["algorithm.policy_loss"] = {"use": "sapo", **temperatures}
    else:
        name = "gspo" if whole_answer else "ppo"
        values["algorithm.policy_loss"] = {"use": name, **bounds, "dual_clip": given.read("delta", number)}
    if kind == "dr_grpo":
        values["algorithm.norm"] = float(given.whole("max_completion_length", 512))
    return values


def beta(value: float, given: Given) -> Mapping[str, Any] | KeyOutcome:
    if str(given.get("trainer")) == "online_dpo":
        several = len(given.read("beta", numbers, [])) > 1
        note = "the first; TRL takes one for each epoch, rlsdk a schedule" if several else ""
        return KeyOutcome({}, note)
    if str(given.get("trainer")) == "rloo":
        return {"algorithm.kl_coef": 0.0, "algorithm.shaping": own_shaping(given)}
    return {"algorithm.kl_coef": value, **({"algorithm.kl": "k3"} if value else {})}


def follows(value: bool, given: Given) -> KeyOutcome:
    if not value:
        return KeyOutcome.ignored("off, as by default")
    if not given.read("beta", number, 0.0):
        return KeyOutcome.ignored("beta is 0, so there is no reference model")
    if given.read("use_peft", flag, False) or given.get("peft_config.class"):
        return KeyOutcome.missing("reference.update_every, which learner.lora excludes, as TRL does")
    mix = given.read("ref_model_mixup_alpha", number, 0.6)
    if not 0 < mix <= 1:
        return KeyOutcome.missing(f"reference.mix is above 0 and at most 1; got ref_model_mixup_alpha {mix:g}")
    every = max(1, given.whole("ref_model_sync_steps", 512) // updates_per_step(given))
    values = {"reference.update_every": every, "reference.mix": mix}
    return KeyOutcome(values, f"TRL counts optimiser steps; a step of rlsdk has {updates_per_step(given)} of them")


def entropy_coef(value: float, given: Given) -> KeyOutcome:
    if given.read("use_adaptive_entropy", flag, False):
        return KeyOutcome({})
    note = _entropy_note(given) if value else ""
    return KeyOutcome({"algorithm.entropy_coef": value}, note)


def _entropy_note(given: Given) -> str:
    """How TRL's bonus differs: it is the mean over tokens whatever the loss, or over those of the quantile."""
    aggregate = LOSSES.get(str(given.get("loss_type")), "token-mean")
    some = given.read("top_entropy_quantile", number, 1.0) < 1
    reduced = f"algorithm.aggregate reduces the bonus, too ({aggregate}); TRL's is the mean over tokens"
    everywhere = "over all sampled tokens; TRL's are those of top_entropy_quantile"
    return "; ".join([*([reduced] if aggregate != "token-mean" else []), *([everywhere] if some else [])])


def adaptive_entropy(value: bool, given: Given) -> KeyOutcome:
    if not value:
        return KeyOutcome.ignored("off, as by default in rlsdk")
    target = {"target": given.read("entropy_target", number, 0.2), "initial": given.read("entropy_coef", number, 0.0)}
    defaults = {"delta": 0.005, "min": 0.0, "max": 1.0}
    rule = {name: given.read(f"entropy_coef_{name}", number, default) for name, default in defaults.items()}
    note = _entropy_note(given)
    return KeyOutcome({"algorithm.entropy_coef": {**target, **rule}}, note)


def _weights(value: bool, given: Given) -> dict[str, Any]:
    """Return the weights by the ratio to vLLM's logprobs; empty without any."""
    if not value or not given.read("use_vllm", flag, False) or str(given.get("loss_type")) == "vespo":
        return {}  # vespo weighs whole answers by the ratio to the sampler itself
    cap = given.read("vllm_importance_sampling_clip_max", number, 3.0)
    low = given.read("vllm_importance_sampling_clip_min", number, 0.0)
    mode = str(given.get("vllm_importance_sampling_mode", "sequence_mask"))
    level, _, action = mode.partition("_")
    if level not in ("token", "sequence") or action not in ("mask", "truncate"):
        return {}
    if action == "truncate":
        return {"use": "tis", "cap": cap, "level": level}
    return {"use": "mis", "low": low, "high": cap, "level": level}


def correction(value: bool, given: Given) -> dict[str, Any]:
    weights, threshold = _weights(value, given), given.read("off_policy_mask_threshold", number)
    both = [weights, _off_policy_mask(threshold)] if threshold is not None else weights
    return {"algorithm.correction": both} if weights else {}


def _off_policy_mask(threshold: float) -> dict[str, Any]:
    return {"use": "zoo/off_policy_mask", "threshold": threshold}


def off_policy(value: float, given: Given) -> KeyOutcome:
    """Convert the mask of bad answers that became unlikely; vLLM's weights come with it."""
    if _weights(given.read("vllm_importance_sampling_correction", flag, True), given):
        return KeyOutcome({}, ZOO)
    return KeyOutcome({"algorithm.correction": _off_policy_mask(value)}, ZOO)
