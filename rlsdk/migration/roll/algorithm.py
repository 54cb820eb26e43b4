"""Batches, steps, learning rates, advantages and losses of ROLL."""

from __future__ import annotations

import ast
import math
from collections.abc import Mapping
from typing import Any

from rlsdk.migration.rules import Give, Given, KeyOutcome
from rlsdk.migration.shared.choices import KL
from rlsdk.migration.shared.learner import ZOO, kl_penalty, minibatches, share_of_steps
from rlsdk.migration.values import UnfitError, flag, number

TRAIN, INFER, VALIDATION = "actor_train", "actor_infer", "validation.generating_args"


def devices(value: Any) -> int:
    """The number of GPUs of a device mapping such as `list(range(0,8))`, which is not evaluated."""
    if isinstance(value, list):
        return len(value)
    try:
        node = ast.parse(str(value), mode="eval").body
    except (SyntaxError, ValueError, RecursionError) as error:
        raise UnfitError(f"expected list(range(first, last)), got {value!r}") from error
    return _devices(node, value)


def _devices(node: ast.expr, value: Any) -> int:
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return _devices(node.left, value) + _devices(node.right, value)
    if isinstance(node, ast.List):
        return len(node.elts)
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.args:
        if node.func.id == "list":
            return _devices(node.args[0], value)
        bounds = [each.value for each in node.args if isinstance(each, ast.Constant) and isinstance(each.value, int)]
        if node.func.id == "range" and len(bounds) == len(node.args) <= 3 and 0 not in bounds[2:]:
            return len(range(*bounds))
    raise UnfitError(f"expected list(range(first, last)), got {value!r}")


def agentic(given: Given) -> bool:
    return bool(given.section("custom_envs")) or "train_env_manager" in given.tree


def rollouts_per_task(given: Given) -> int:
    if agentic(given):
        return given.whole("train_env_manager.group_size")
    return max(
        given.whole("num_return_sequences_in_group"), given.whole(f"{INFER}.generating_args.num_return_sequences")
    )


def learner_gpus(given: Given) -> int:
    found: int | None = given.read(f"{TRAIN}.device_mapping", devices)
    return found or given.whole("num_gpus_per_node") * given.whole("num_nodes")


def updates_per_step(given: Given) -> int:
    arguments = f"{TRAIN}.training_args"
    rows = given.whole(f"{arguments}.per_device_train_batch_size") * given.whole(
        f"{arguments}.gradient_accumulation_steps"
    )
    rollouts = given.whole("rollout_batch_size")
    if not agentic(given):  # an agentic pipeline counts trajectories, RLVR counts prompts
        rollouts *= rollouts_per_task(given)
    return minibatches(rollouts, rows * _replicas(given))


def _replicas(given: Given) -> int:
    """Ranks with batches of their own; others split a model or a sequence."""
    config = f"{TRAIN}.strategy_args.strategy_config"
    sizes = ("tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size")
    shared = math.prod(given.whole(f"{config}.{size}") for size in sizes)
    return max(1, learner_gpus(given) // max(1, shared * given.whole(f"{TRAIN}.model_args.ulysses_size")))


def context_length(given: Given) -> int:
    length = given.whole("sequence_length", 0)
    return length or given.whole("prompt_length") + given.whole("response_length", 1024)


def answer_length(given: Given) -> int:
    """Maximum tokens of an answer, or of a turn in an environment."""
    if agentic(given):
        return max(1, min(given.whole(f"{INFER}.generating_args.max_new_tokens", 8192), context_length(given) - 1))
    return max(1, context_length(given) - given.whole("prompt_length"))


def batch(value: int, given: Given) -> KeyOutcome:
    if not agentic(given):
        return KeyOutcome({"batch_size": value})
    return KeyOutcome(
        {"batch_size": max(1, value // rollouts_per_task(given))},
        "ROLL counts trajectories; rlsdk counts tasks, each with group_size rollouts",
    )


def warmup_ratio(value: float, given: Given) -> KeyOutcome:
    if given.whole(f"{TRAIN}.training_args.warmup_steps", 0):
        return KeyOutcome.ignored("warmup_steps takes precedence")
    return share_of_steps(given.whole("max_steps", 0) * updates_per_step(given) or None, value)


def evaluated_length(given: Given) -> int:
    """Return the maximum tokens of an answer in evaluations; 0 if it is that of the training."""
    whole_length = given.whole("val_sequence_length", 0)
    answers = whole_length - given.whole("val_prompt_length", given.whole("prompt_length", 1024))
    return answers if whole_length and answers > 0 and answers != answer_length(given) else 0


def counts_tokens(given: Given) -> bool:
    """True if micro-batches are measured in tokens."""
    return bool(given.read(f"{TRAIN}.use_dynamic_batching_in_train", flag, False))


def packed_tokens(given: Given) -> int:
    """Return the tokens of a micro-batch of packed sequences; 0 if they are not packed by tokens."""
    packs = given.read(f"{TRAIN}.use_sequence_packing", flag, False)
    return given.whole(f"{TRAIN}.sequence_packing_args.max_packed_sequence_length_train", 0) if packs else 0


CORRECTION = "train_infer_correction"
MASKS = {"token": "token_mask", "sequence": "sequence_mask", "geometric": "geometric"}
"""Level of a filter of tokens by their ratio -> rlsdk's correction."""


def estimator(value: Any, given: Given) -> KeyOutcome:
    """The advantage: ROLL normalises rewards first, then takes discounted sums of what is left."""
    grouping = str(given.get("reward_normalization.grouping", ""))
    method = str(given.get("reward_normalization.method", ""))
    mean, std = _norm_type("mean", given), _norm_type("std", given)
    if mean:
        grouping, method = mean, method or ("mean_std" if std else "mean")
    grouped = method != "identity" and (grouping == "group" or "traj_group_id" in grouping)
    shaping: list[dict[str, Any]] = []
    note = ""
    gae = {
        "use": "gae",
        "whiten": False,
        **{k: given.read(j, number, 1.0) for k, j in (("gamma", "gamma"), ("lam", "lambd"))},
    }
    gigpo = {
        "use": "gigpo",
        "omega": given.read("step_reward_weight", number, 1.0),
        "gamma": given.read("step_reward_gamma", number, 0.95),
    }
    if value == "grpo" or (value in ("reinforce", "step_reinforce") and grouped):
        # RLVR's grpo always divides by the deviation of the group, unless an older version was told to shift only.
        always = value == "grpo" and not agentic(given) and not given.read("reward_shift", flag, False)
        spread = always or method in ("mean_std", "asym_clip") or (value == "grpo" and not method)
        over = {"std_over": "batch"} if spread and std == "batch" and not always else {}
        algorithm, advantage = "grpo", {"use": "grpo", "std_normalize": spread, **over}
        note = "in rlsdk, the advantage includes the normalisation of rewards by group"
    elif value == "gae":
        algorithm, advantage = "ppo", gae
    elif value == "gigpo":
        algorithm, advantage = "gigpo", gigpo
    elif value == "agentic_reinforce" or gae["gamma"] == 1.0:  # undiscounted, tokens earn what turns do
        algorithm, advantage = "reinforce_plus_plus", {"use": "segment_returns", "gamma": gae["gamma"]}
    else:
        algorithm, advantage = "reinforce_plus_plus", {"use": "reinforce_plus_plus", "gamma": gae["gamma"]}
        note = "rlsdk always whitens returns over the batch"
    by = {"batch": "batch", "running": "batch", "tags": "source"}.get(grouping)
    if by and method in ("mean", "mean_std", "asym_clip") and algorithm != "grpo":
        shaping.append({"use": "reward_norm", "by": by, "method": "running" if grouping == "running" else method})
    bound = given.read("reward_clip", number)
    if bound:
        shaping.append({"use": "reward_clip", "low": -bound, "high": bound})
    values: dict[str, Any] = {
        "algorithm.use": algorithm,
        "algorithm.advantage": advantage,
        "algorithm.critic": value == "gae",
        "algorithm.value_clip": given.read("value_clip", number) if value == "gae" else None,
        "algorithm.shaping": [*shaping, *_kl_in_reward(given)],
    }
    return KeyOutcome(values, note)


def _norm_type(of: str, given: Given) -> str:
    """Return what rewards are normalised over (`group`, `batch` or `running`), by its mean or by its deviation."""
    found = given.get(f"norm_{of}_type") or given.get(f"reward_normalization.norm_{of}_type")
    only_the_other = given.read("reward_scale" if of == "mean" else "reward_shift", flag, False)
    return str(found or ("" if only_the_other else given.get("reward_norm", "")))


def _kl_in_reward(given: Given) -> list[dict[str, Any]]:
    coefficient = given.read("init_kl_coef", number, 0.2)
    if not given.read("add_token_level_kl", flag, False):
        return []
    estimator, target = given.read("kl_penalty", KL, "k1"), given.read("target_kl", number)
    return kl_penalty(coefficient, estimator, target, given.whole("kl_horizon", 10000))


def clip(value: float, given: Given) -> KeyOutcome:
    if str(given.get(f"{TRAIN}.pg_variant", "ppo")) != "ppo":
        return KeyOutcome.ignored(f"{TRAIN}.pg_variant takes precedence")
    return KeyOutcome({"algorithm.policy_loss": _ppo(given)})


def _ppo(given: Given) -> dict[str, Any]:
    clip = given.read("pg_clip", number, 0.2)
    bounds = {"clip_low": clip, "clip_high": clip}
    if given.read("use_pg_clip_range", flag, False):
        bounds = {f"clip_{end}": given.read(f"pg_clip_{end}", number, clip) for end in ("low", "high")}
    cap = 1 + 2 * clip if given.read("dual_clip_loss", flag, False) else None
    name = "gspo" if str(given.get("importance_sampling")) == "seq" else "ppo"
    return {"use": name, **bounds, "dual_clip": cap}


def variant(value: str, given: Given) -> KeyOutcome:
    low, high = (given.read(f"{TRAIN}.cispo_epsilon_{end}", number, 0.1) for end in ("low", "high"))
    options = {
        "ppo": _ppo(given),
        "vanilla": {"use": "reinforce"},
        "tis": {"use": "tis", "cap": given.read(f"{TRAIN}.tis_upper_bound", number, 1.0)},
        "topr": {"use": "topr", "cap": 1.0},
        "cispo": {"use": "cispo", "clip_low": low, "clip_high": high},
        "kimi15": {"use": "zoo/kimi", "tau": given.read(f"{TRAIN}.kimi15_tau", number, 0.1), "level": "token"},
    }
    note = {"topr": "ROLL truncates the ratio of each token, rlsdk that of the whole answer", "kimi15": ZOO}.get(
        value, ""
    )
    return KeyOutcome({"algorithm.policy_loss": options[value]}, note)


def difficulty(value: bool, given: Given) -> KeyOutcome:
    if not value:
        return KeyOutcome.ignored("off")
    bounds = {"low": given.read("difficulty_low_threshold", number, 0.0),
              "high": given.read("difficulty_high_threshold", number, 1.0)}  # fmt: skip
    note = "drops the group, by the share of rollouts that pass; ROLL masks it, by its mean reward"
    return KeyOutcome({"algorithm.filters[]": {"use": "pass_rate", **bounds}}, note)


def bounded_rewards(_: Any, given: Given) -> KeyOutcome:
    chosen = estimator(str(given.get("adv_estimator")), given).values["algorithm.use"]
    grouped = chosen == "grpo" and "ROLL bounds what is left after rewards are compared within their group"
    return KeyOutcome({}, grouped or "")


def _filters_of_ratios(given: Given) -> list[Mapping[str, Any]]:
    listed = given.tree.get(CORRECTION)
    listed = listed.get("filters") if isinstance(listed, Mapping) else None
    found = [each for each in listed if isinstance(each, Mapping)] if isinstance(listed, list) else []
    return [each for each in found if str(each.get("enabled", False)).lower() in ("true", "1")]


def mismatch(_: Any, given: Given) -> KeyOutcome:
    """Convert ROLL's weights and masks for the mismatch of engine and learner."""
    weighted = given.read(f"{CORRECTION}.is_weight.enabled", flag, False)
    level = str(given.get(f"{CORRECTION}.is_weight.weight_type", "token"))
    cap = given.read(f"{CORRECTION}.is_weight.upper_bound", number, 1.2)
    masks = [_filter_of_ratios(each) for each in _filters_of_ratios(given)]
    if not weighted and not masks:
        return KeyOutcome.ignored("off")
    if weighted and level not in ("token", "sequence"):
        raise UnfitError(f"no correction weighs by the ratio of a {level}; see rlsdk plugins correction")
    single = len(masks) == 1 and masks[0]["use"] == MASKS.get(level) and cap >= masks[0]["high"]
    if weighted and single:
        return KeyOutcome({"algorithm.correction": {**masks[0], "use": "mis", "level": level}})
    found = [*([{"use": "tis", "cap": cap, "level": level}] if weighted else []), *masks]
    return KeyOutcome({"algorithm.correction": found if len(found) > 1 else found[0]})


def _filter_of_ratios(given: Mapping[str, Any]) -> dict[str, Any]:
    kind = str(given.get("agg_type", "token"))
    if flag(given.get("diff_enabled", False)) or not flag(given.get("ratio_enabled", True)):
        raise UnfitError("no correction masks by differences of probabilities; see rlsdk plugins correction")
    if kind not in MASKS:
        raise UnfitError(f"no correction masks by the ratio of a {kind}; see rlsdk plugins correction")
    low, high = number(given.get("ratio_low", 0.8)), number(given.get("ratio_high", 1.2))
    return {"use": MASKS[kind], "low": low, "high": high}


def kl_loss(value: bool, given: Given) -> dict[str, Any]:
    if not value:
        return {"algorithm.kl_coef": 0.0}
    return {"algorithm.kl_coef": given.read("kl_loss_coef", number, 0.0), "algorithm.kl": "low_var"}


def distills(given: Given) -> bool:
    """True for the pipeline of on-policy distillation, in which a teacher takes the place of rewards."""
    return "student_train" in given.tree


def distillation(given: Given) -> dict[str, Any]:
    clip = given.read("advantage_clip", number)
    coefficient = given.read("teacher.opd_kl_coef", number, 1.0)
    return {
        "algorithm.use": "opd",
        "algorithm.advantage": {"use": "on_policy_distill", "coef": coefficient},
        "algorithm.critic": False,
        "algorithm.shaping": [],
        "algorithm.clip_advantages": clip,
    }


def of_rewards(give: Give) -> Give:
    """Return a converter that has nothing to do if a teacher takes the place of rewards."""

    def given_rewards(value: Any, given: Given) -> Mapping[str, Any] | KeyOutcome:
        if distills(given):
            return KeyOutcome.ignored("a teacher takes the place of rewards")
        return give(value, given)

    return given_rewards
