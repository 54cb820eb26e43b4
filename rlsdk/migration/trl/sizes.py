"""Batches, steps and learning rates of TRL."""

from __future__ import annotations

from typing import Any

from rlsdk.migration.rules import Given, KeyOutcome
from rlsdk.migration.shared.learner import minibatches, share_of_steps
from rlsdk.migration.trl.trainers import answers_per_row, counts_batches
from rlsdk.migration.values import Choice, number

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
