"""Checks of a plan with `model.exact`: everything that would make engine and learner compute differently."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

from rlsdk import preflight
from rlsdk.cluster.placement import threads_of
from rlsdk.config import Plan
from rlsdk.contracts import ComputesExactly
from rlsdk.exact import architecture_fault
from rlsdk.kinds import Kind
from rlsdk.plugins import CORE, ComponentRef


def exact_faults(plan: Plan, net: Any | None) -> Iterator[tuple[str, str]]:
    """Yield reasons why a plan with `model.exact` would not be exact, as (path of the setting, reason).

    Args:
        plan: Checked plan.
        net: The plan's model without its weights; None if it could not be built.
    """
    if not plan.config.model.exact:
        return
    yield from _settings(plan)
    yield from _threads(plan)
    parts: tuple[tuple[Kind, ComponentRef], ...] = (("engine", plan.engine), ("learner", plan.learner))
    for path, reference in parts:
        component = plan.plugins.resolve(reference)
        if not isinstance(component, ComputesExactly):
            offered = plan.plugins.components(CORE, path).items()
            others = " or ".join(name for (_, name), each in offered if hasattr(each.obj, "exact_faults"))
            text = f"the {path} {reference.name!r} computes logprobs in its own way; use {path}: {others}"
            yield path, f"model.exact: {text}"
            continue
        yield from ((path, f"model.exact: {fault}") for fault in component.exact_faults())
    if net is not None and (fault := architecture_fault(net.config.get_text_config())):
        yield "model.exact", f"{fault}; leave model.exact out"


def _settings(plan: Plan) -> Iterator[tuple[str, str]]:
    config, why = plan.config, "model.exact"
    if config.model.dtype != "float32":
        yield "model.dtype", f"{why} needs float32, got {config.model.dtype}: 16-bit kernels round in different ways"
    if not plan.sampled or "pairs" in plan.needs:
        yield (
            "algorithm",
            f"{why}: an algorithm of {'pairs' if plan.sampled else 'demonstrations'} has nothing to compare",
        )
    if config.rollout.runs_ahead or config.rollout.replay.share:
        yield (
            "rollout",
            f"{why}: tokens of older weights have other logprobs; train synchronously and each group once "
            "(max_staleness: 0, sync_interval: 1, no oversample, stop or replay)",
        )
    if config.old_logprobs != "learner":
        yield "old_logprobs", f"{why} compares the engine's logprobs with the learner's; leave old_logprobs out"


def _threads(plan: Plan) -> Iterator[tuple[str, str]]:
    place, gpus = plan.config.placement, preflight.gpu_count()
    if place.device == "cuda" or (place.device == "auto" and gpus):
        yield "placement.device", "model.exact requires a CPU: GPU kernels sum in varying order; set it to cpu"
        return
    engine, learner = threads_of(place, os.cpu_count() or 1)
    if engine != learner:
        yield (
            "placement.learner_threads",
            f"model.exact: engines with {engine} threads and learners with {learner} would "
            "split sums in different ways; give placement.engine_threads and placement.learner_threads the same value",
        )
