"""Batches, steps and learning rates of OpenRLHF."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rlsdk.migration.rules import Given, KeyOutcome
from rlsdk.migration.shared.learner import critic_warmup, minibatches, share_of_steps
from rlsdk.migration.values import flag

FROM_ZERO = "OpenRLHF counts steps from 0: its actor is frozen for one step more than it says"


def learner_gpus(given: Given) -> int:
    return given.whole("actor.num_nodes") * given.whole("actor.num_gpus_per_node", 8)


def token_limits(given: Given) -> tuple[int, int, int]:
    """Maximum tokens of a prompt, of a response, and of both; versions up to 0.9 had limits for each part."""
    total = given.whole("data.max_len", 2048)
    response = given.whole("rollout.max_new_tokens", 0)
    if "data.prompt_max_len" in given.flat or ("data.max_len" not in given.flat and response >= total):
        prompt = given.whole("data.prompt_max_len", 1024)
        return prompt, response or 1024, prompt + (response or 1024)
    return max(1, total - (response or 1)), response or max(1, total - 1), total


def updates_per_step(given: Given) -> int:
    rollouts = given.whole("rollout.batch_size", 1024) * given.whole("rollout.n_samples_per_prompt")
    return minibatches(rollouts, given.whole("train.batch_size", 128))


def micro_batch(value: int, given: Given) -> KeyOutcome:
    if given.read("train.dynamic_batch_enable", flag, False):
        return KeyOutcome.ignored("train.max_tokens_per_gpu takes precedence")
    return KeyOutcome(
        {"learner.micro_batch_tokens": value * token_limits(given)[2]},
        "rlsdk counts tokens, padding included: sequences × data.max_len",
    )


def micro_batch_tokens(value: int, given: Given) -> KeyOutcome:
    if not given.read("train.dynamic_batch_enable", flag, False):
        return KeyOutcome.ignored("train.dynamic_batch_enable is off")
    return KeyOutcome({"learner.micro_batch_tokens": value}, "includes padding, which OpenRLHF does not count")


def mini_batch(value: int, given: Given) -> KeyOutcome:
    return KeyOutcome(
        {"minibatches": updates_per_step(given)},
        "rlsdk counts optimiser steps per batch, OpenRLHF the rollouts in each",
    )


def warmup(value: float, given: Given) -> KeyOutcome:
    if value == 0:
        return share_of_steps(None, 0.0)
    samples = given.whole("data.max_samples", 0)
    batch = given.whole("rollout.batch_size", 1024)
    known = 0 < samples < 10**8
    steps = samples // batch * given.whole("train.num_episodes") * updates_per_step(given) if known else None
    return share_of_steps(steps, value)


def freezing(value: int, given: Given) -> KeyOutcome | Mapping[str, Any]:
    """OpenRLHF has counted from 0 since 0.9.1, and from 1 before; its flag has had a new name since 0.10.2."""
    older = "critic.freezing_steps" in given.written
    more, note = (0, "OpenRLHF 0.9.1 to 0.10.1 froze the actor for one step more: add 1") if older else (1, FROM_ZERO)
    return critic_warmup("algo.advantage.estimator", "gae", more, note)(value, given)


def most_rows(value: int, given: Given) -> KeyOutcome:
    if value >= 10**8:
        return KeyOutcome.ignored("all of the data")
    return KeyOutcome.missing(
        f"if the data has more rows: split 'train[:{value}]' of the source hub, or a shorter file"
    )


def generated_at_once(value: int, given: Given) -> KeyOutcome:
    batch = given.whole("rollout.batch_size", 1024)
    if value == batch:
        return KeyOutcome.ignored("as many as a batch")
    if value < batch:
        return KeyOutcome.missing(f"OpenRLHF then trains on {value} tasks at a time: set batch_size")
    return KeyOutcome({"rollout.oversample": value / batch - 1}, "the share above a batch")
