"""Batches, steps and learning rates of ROLL."""

from __future__ import annotations

import ast
import math
from typing import Any

from rlsdk.migration.rules import Given, KeyOutcome
from rlsdk.migration.shared.learner import minibatches, share_of_steps
from rlsdk.migration.values import UnfitError, flag

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
