"""Conversions of the settings of learners and algorithms that several trainers share."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Container
from typing import Any

import attrs

from rlsdk.migration.rows import changed, part, same, switched
from rlsdk.migration.rules import Give, Given, KeyOutcome, KeyRule
from rlsdk.migration.shared.choices import DECAY_SHAPE
from rlsdk.migration.values import flag, number, text

LEARNER_NOTE = "rlsdk's learner is DeepSpeed ZeRO"
CRITIC_WARMUP_NOTE = "critic_warmup is the first step that trains the actor, counted from 1"
OPTIMIZER_NOTE = "learner.optimizer is adamw, sgd, or one of a plugin (howto/optimizer.md)"
OPTIMIZER_OPTIONS_NOTE = "options of an optimiser: learner.optimizer: {use: …} (howto/optimizer.md)"
MUON_NOTE = "learner.optimizer=zoo/muon needs model.dtype=float32 and learner.zero_stage=0"
ZOO = "from a plugin: pip install plugins/rlsdk-zoo, in a clone of rlsdk"

FULLY_TRAINED_NOTE = (
    "an adapter trains no layers fully: leave these as they are, or remove learner.lora to train all weights"
)
OFFLOAD_OPTIMIZER = {"learner.offload": "optimizer"}
OFFLOAD_ALL = {"learner.zero_stage": 3, "learner.offload": "all"}


def of_critic(estimator: str, name: str, to: str, of_actor: str = "") -> Give:
    """Return the converter of a critic's setting.

    Args:
        estimator: Key of the advantage.
        name: The advantage that has a critic.
        to: Path that the value is set to.
        of_actor: Key of the actor's model, from which a critic starts by default.
    """

    def give(value: Any, given: Given) -> KeyOutcome:
        if str(given.get(estimator)) != name:
            return KeyOutcome.ignored("the algorithm has no critic; a reward has its own model: reward_model")
        if of_actor and value == given.get(of_actor):
            return KeyOutcome.ignored("the critic starts from model.path")
        return KeyOutcome({to: value})

    return give


def critic_warmup(estimator: str, name: str, more: int = 0, note: str = "") -> Give:
    """Return the converter of the number of first steps that train the critic alone.

    Args:
        estimator: Key of the advantage.
        name: The advantage that has a critic.
        more: Number of such steps less the given number.
        note: How the other trainer counts, if `more` is not 0.
    """

    def give(value: int, given: Given) -> KeyOutcome:
        steps = value + more
        if value < 0 or steps <= 0:
            return KeyOutcome.ignored("actor and critic are trained from the first step")
        if str(given.get(estimator)) != name:
            return KeyOutcome.ignored("the algorithm has no critic")
        return KeyOutcome({"critic.warmup_steps": steps}, note)

    return give


def minibatches(batch: int, mini: int) -> int:
    """Return the number of optimiser steps that a batch is divided into."""
    return max(1, math.ceil(batch / max(mini, 1)))


def transformers_schedule(arguments: str) -> Give:
    """Set one of transformers' schedules, which decay to 0.

    Args:
        arguments: Key of the section with the schedule's own arguments.
    """

    def give(value: str, given: Given) -> dict[str, Any]:
        found: dict[str, Any] = {"learner.schedule": value}
        if value != "constant":
            found["learner.final_ratio"] = 0.0
        if value == "polynomial":
            found["learner.decay_power"] = given.read(f"{arguments}.power", number, 1.0)
        if value == "wsd":
            found["learner.decay_shape"] = given.read(f"{arguments}.decay_type", DECAY_SHAPE, "cosine")
            if steps := given.whole(f"{arguments}.num_decay_steps", 0):
                found["learner.decay_steps"] = steps
        return found

    return give


def weight_decay(key: str, sample: float, matrices: Callable[[Given], bool] = lambda _: True) -> KeyRule:
    """Return the rule of AdamW's weight decay.

    Args:
        key: Key of the weight decay.
        sample: Typical value.
        matrices: Tells from the other keys whether biases and norms are left out.
    """

    def give(value: float, given: Given) -> dict[str, Any]:
        left_out = {"learner.weight_decay_on": "matrices"} if value and matrices(given) else {}
        return {"learner.weight_decay": value, **left_out}

    return KeyRule(key, "mapped", ("learner.weight_decay", "learner.weight_decay_on"), "", sample, number, give)


def optimizer(
    key: str, sample: str, adamw: Container[str], betas: Callable[[Given], list[float]] | None = None
) -> KeyRule:
    """Return the rule of the optimiser's name.

    Args:
        key: Key of the name.
        sample: Name of an optimiser.
        adamw: Names of AdamW, in lower case.
        betas: Reads the betas of Lion from the other keys; None for its defaults.
    """

    def give(value: str, given: Given) -> KeyOutcome:
        name = value.lower()
        if name in adamw:
            return KeyOutcome.ignored("AdamW, the default")
        found = optimizer_of(name)
        if betas is not None and found.values == {"learner.optimizer": "zoo/lion"}:
            return attrs.evolve(found, values={"learner.optimizer": {"use": "zoo/lion", "betas": betas(given)}})
        return found

    return KeyRule(key, "mapped", ("learner.optimizer",), "", sample, text, give)


def optimizer_of(name: str) -> KeyOutcome:
    """Convert the name of an optimiser other than AdamW, in lower case."""
    if name == "sgd":
        return KeyOutcome({"learner.optimizer": "sgd"})
    if re.fullmatch(r"(paged_)?lion(_(8|32)bit)?", name):
        return KeyOutcome({"learner.optimizer": "zoo/lion"}, ZOO)
    if "muon" in name:
        return KeyOutcome.missing(MUON_NOTE)
    return KeyOutcome.missing(OPTIMIZER_NOTE)


def lora_of(alpha: str, usual: float) -> Give:
    """Return the converter of an adapter's rank; 0 trains no adapter.

    Args:
        alpha: Key of its alpha.
        usual: The other trainer's default of alpha.
    """

    def give(value: int, given: Given) -> dict[str, Any]:
        return {"learner.lora": {"rank": value, "alpha": given.read(alpha, number, usual)}} if value else {}

    return give


def share_of_steps(steps: int | None, ratio: float) -> KeyOutcome:
    """Convert warm-up steps given as a share of all optimiser steps."""
    if ratio == 0:
        return KeyOutcome({"learner.warmup_steps": 0})
    if steps is None:
        note = f"a share of all steps, which depend on the data: set learner.warmup_steps to {ratio:g} times it"
        return KeyOutcome.missing(note)
    found = round(steps * ratio)
    return KeyOutcome({"learner.warmup_steps": found}, f"in optimiser steps: {ratio:g} of {steps}")


def least_rate(peak: str, usual: float) -> Give:
    """Return the converter of the last learning rate, which is a share of the peak in rlsdk.

    Args:
        peak: Key of the peak.
        usual: The other trainer's default of the peak.
    """

    def give(value: float, given: Given) -> dict[str, Any]:
        highest = given.read(peak, number, usual)
        return {"learner.final_ratio": min(1.0, value / highest)} if highest else {}

    return give


def adam_betas() -> tuple[KeyRule, ...]:
    """Return the rules of transformers' two keys for the betas."""

    def give(value: float, given: Given) -> dict[str, Any]:
        return {"learner.betas": [value, given.read(given.key.removesuffix("1") + "2", number, 0.999)]}

    return same("adam_beta1", "learner.betas", number, 0.9, give) + part("adam_beta2", "learner.betas", number, 0.999)


def offloads() -> tuple[KeyRule, ...]:
    """Return the rules of the keys by which veRL's learner leaves its state in main memory."""
    return (
        *changed(
            "optimizer_offload", "learner.offload", flag, True, LEARNER_NOTE, switched(OFFLOAD_OPTIMIZER, LEARNER_NOTE)
        ),
        *changed(
            *("param_offload", "learner.offload learner.zero_stage", flag, True, LEARNER_NOTE),
            switched(OFFLOAD_ALL, LEARNER_NOTE),
        ),
    )


def lora_targets(rank: str = "") -> Give:
    """Return the converter of the layers that an adapter trains.

    Args:
        rank: Key of its rank, at 0 of which there is none; empty if there always is one.
    """

    def give(value: list[str], given: Given) -> dict[str, Any]:
        if rank and not given.whole(rank, 0):
            return {}
        return {"learner.lora.targets": value if value != ["all-linear"] else "all-linear"}

    return give


def kl_penalty(
    coefficient: float, estimator: Any, target: float | None = None, horizon: int = 10000
) -> list[dict[str, Any]]:
    """Return the shapings that a KL in the reward is, whose coefficient follows a target if there is one."""
    if not coefficient or estimator is None:
        return []
    found = {"use": "kl_penalty", "coef": coefficient, "estimator": estimator}
    return [{**found, "target": target, "horizon": horizon} if target else found]


def overlong(max_length: int, buffer: int | None, penalty: float) -> list[dict[str, Any]]:
    """Return the shapings that DAPO's penalty of long answers is."""
    return [{"use": "overlong", "max_length": max_length, "buffer": buffer, "penalty": penalty}]
