"""Checks of a model's files and class before a run: the learner's weights must be those that the engines expect."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from rlsdk.config import Plan
from rlsdk.contracts import ExaminesModel, ReplaysRouting, ReturnsRouting
from rlsdk.conversion import Differences, compare, read_header

_LISTED = 4
"""Tensors of each sort that a message names."""


def model_faults(plan: Plan, net: Any, *, trains: bool) -> Iterator[tuple[str, str]]:
    """Say why a model cannot be used by the learner and the engines of a plan, as pairs (path of the setting, reason).

    Args:
        plan: Checked plan.
        net: The plan's model without its weights; its name conversions may be changed.
        trains: True for a program that has a learner.
    """
    header = read_header(plan.model.path)
    if trains and header is not None and (found := compare(net, header)):
        yield "model.path", _in_words(plan, net, found)
    parts = [("learner", plan.learner)] if trains else []
    for path, reference in [*parts, *([("engine", plan.engine)] if plan.needs_engine else [])]:
        component = plan.plugins.resolve(reference)
        if isinstance(component, ExaminesModel):
            yield from ((path, f"{reference.name!r}: {fault}") for fault in component.model_faults(net))
    if plan.replays_routing:
        yield from _routing_faults(plan, net, trains=trains)


def _routing_faults(plan: Plan, net: Any, *, trains: bool) -> Iterator[tuple[str, str]]:
    """Say why the engine's choices of experts cannot be replayed by the learner."""
    other = "or take another correction, such as icepop"
    assert plan.loss.correction is not None
    what = f"correction {plan.loss.correction.name!r} replays the experts that the engine chose"
    engine, learner = plan.plugins.resolve(plan.engine), plan.plugins.resolve(plan.learner)
    if not isinstance(engine, ReturnsRouting):
        yield "engine", f"{what}, and {plan.engine.name!r} does not return them; set engine=transformers, {other}"
    else:
        faults = engine.routing_faults(net)
        yield from (("engine", f"{what}: {plan.engine.name!r}: {fault}, {other}") for fault in faults)
    if trains and not isinstance(learner, ReplaysRouting):
        yield "learner", f"{what}, and {plan.learner.name!r} cannot use them; set learner=deepspeed, {other}"
    elif trains:
        faults = learner.routing_faults(net)
        yield from (("learner", f"{what}: {plan.learner.name!r}: {fault}, {other}") for fault in faults)


def _in_words(plan: Plan, net: Any, found: Differences) -> str:
    parts = [
        f"{text} {len(names)} ({', '.join(names[:_LISTED])}{', …' if len(names) > _LISTED else ''})"
        for names, text in (
            (found.missing, "of the model's tensors they lack"),
            (found.extra, "of theirs the model lacks"),
            (found.misshapen, "of another shape are"),
        )
        if names
    ]
    quantised = getattr(net.config, "quantization_config", None)
    by = "" if quantised is None else " It is quantised, and a learner trains plain weights: dequantise it first."
    return (
        f"the files of {plan.model.path!r} do not hold what the learner would send to the engines: {'; '.join(parts)}."
        f"{by} If config.json is right, open the model with transformers ({type(net).__name__}.from_pretrained), look "
        "at its warnings, write it with save_pretrained into a new folder, and train that"
    )
