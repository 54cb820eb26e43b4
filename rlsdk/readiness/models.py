"""Checks of a plan's model, of images and of `model.exact`, made before anything starts."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rlsdk import preflight
from rlsdk.cluster.placement import threads_of
from rlsdk.config import Plan
from rlsdk.config.plan import NORMED
from rlsdk.contracts import (
    Adapter,
    ComputesExactly,
    ExaminesModel,
    GivesAdapter,
    LimitsLength,
    PlaysEpisodes,
    ReadsImages,
    ReplaysRouting,
    ReturnsRouting,
    ShowsImages,
    TakesAdapter,
)
from rlsdk.conversion import Differences, compare, read_header
from rlsdk.engines.pretrained import constant_positions, positions
from rlsdk.errors import ConfigError, EngineError, RlsdkError, ValueFault
from rlsdk.exact import architecture_fault
from rlsdk.kinds import Kind
from rlsdk.learners.options import LearnerOptions
from rlsdk.plugins import CORE, ComponentRef
from rlsdk.types import Task
from rlsdk.vision import Vision, sees

_LISTED = 4
"""Maximum number of tensors of each category named in a message."""


def model_faults(plan: Plan, net: Any, *, trains: bool) -> Iterator[tuple[str, str]]:
    """Yield reasons why the learner or the engines of a plan cannot use its model, as (path of the setting, reason).

    Args:
        plan: Checked plan.
        net: The plan's model without its weights; the call may change its name conversions.
        trains: True for a program that has a learner.
    """
    try:
        header = read_header(plan.model.path)
    except ValueFault as error:
        yield "model.path", str(error)
        return
    if trains and (quantised := getattr(net.config, "quantization_config", None)):
        method = quantised.get("quant_method", "") if isinstance(quantised, Mapping) else ""
        yield (
            "model.path",
            f"{plan.model.path!r} is quantised (quantization_config in its config.json{method and f': {method}'}), and "
            "a learner trains plain weights: train the model that it was made from, or a plain bfloat16 copy",
        )
        return
    if trains and header is not None and (found := compare(net, header)):
        yield "model.path", _in_words(plan, net, found)
    parts = [("learner", plan.learner)] if trains else []
    for path, reference in [*parts, *([("engine", plan.engine)] if plan.needs_engine else [])]:
        component = plan.plugins.resolve(reference)
        if path == "engine" and trains and (adapter := adapter_of(plan)) and isinstance(component, TakesAdapter):
            try:
                component.expect_adapter(adapter)
            except EngineError as error:
                yield "learner.lora", f"{reference.name!r}: {error}"
        if isinstance(component, ExaminesModel):
            yield from ((path, f"{reference.name!r}: {fault}") for fault in component.model_faults(net))
    yield from _length_faults(plan, net)
    constant, given = constant_positions(net.config.get_text_config()), plan.model.max_length
    if trains and given > constant:
        yield (
            "model.max_length",
            f"{given:,}, but beyond {int(constant):,} tokens the model's rotary frequencies depend on the longest "
            "sequence of a batch (rope_type dynamic or longrope), and the learner's batches are not the engine's; set "
            f"model.max_length={int(constant)} or less",
        )
    if plan.replays_routing:
        yield from _routing_faults(plan, net, trains=trains)


def adapter_of(plan: Plan) -> Adapter | None:
    """Return the shape of the adapters that the learner of a plan sends; None for whole models."""
    learner = plan.plugins.resolve(plan.learner)
    return learner.adapter if isinstance(learner, GivesAdapter) else None


def _length_faults(plan: Plan, net: Any) -> Iterator[tuple[str, str]]:
    """Report sequences longer than the model supports, if the plan's engine refuses to start for them."""
    if not plan.needs_engine:
        return
    engine, given = plan.plugins.resolve(plan.engine), plan.model.max_length
    if isinstance(engine, LimitsLength) and given > (longest := engine.longest(net)):
        yield (
            "model.max_length",
            f"{given:,}, but the config.json of the model says that it was made for {int(longest):,} tokens, and "
            f"{plan.engine.name!r} does not start for more; set model.max_length={int(longest)} or less",
        )


def length_notes(plan: Plan, net: Any) -> Iterator[tuple[str, str]]:
    """Note sequences that may be longer than the plan's model supports, unless that is a fault."""
    longest = positions(net.config.get_text_config())
    if plan.model.max_length > longest and not any(_length_faults(plan, net)):
        yield (
            "model.max_length",
            f"{plan.model.max_length:,}, but the config.json of the model says that it was made for {int(longest):,} "
            "tokens; its output beyond them may be nonsense",
        )


def idle_notes(plan: Plan) -> Iterator[tuple[str, str]]:
    """Note settings of models and learners that have no effect in a plan."""
    config, critic, reference = plan.config, plan.algorithm.critic, plan.needs_reference
    no_critic, no_reference = (
        "nothing reads it: the algorithm has no critic",
        "nothing reads it: the algorithm needs no reference model",
    )
    given = {
        "model.critic": (not critic and config.model.critic is not None, no_critic),
        "critic.ranks": (not critic and config.critic.ranks > 0, no_critic),
        "critic.learner": (not critic and config.critic.learner is not None, no_critic),
        "model.reference": (not reference and config.model.reference is not None, no_reference),
        "reference.ranks": (not reference and config.reference.ranks > 0, no_reference),
        "reference.learner": (not reference and config.reference.learner is not None, no_reference),
    }
    chosen, loss = plan.tree.get("algorithm"), plan.loss
    parts = chosen if isinstance(chosen, Mapping) else {}
    marked = "preferred" in plan.needs and "pairs" not in plan.needs
    unread = {
        "value_clip": (not critic, no_critic),
        "kl": (loss.kl is None, "nothing reads it: algorithm.kl_coef is 0"),
        "norm": (loss.aggregate != NORMED, f"nothing reads it: algorithm.aggregate is {loss.aggregate}"),
        "passing": (not marked, "nothing reads it: the policy loss does not learn from right and wrong answers"),
    }
    given |= {
        f"algorithm.{name}": (idle and parts.get(name) is not None, text) for name, (idle, text) in unread.items()
    }
    learner, options = plan.plugins.resolve(plan.learner), plan.learner.options
    if isinstance(learner, LearnerOptions):
        constant = learner.schedule_name == "constant"
        trained = None if config.steps is None else max(0, config.steps - config.critic.warmup_steps)
        updates = None if trained is None else trained * config.updates
        given |= {
            "learner.critic_lr": (not critic and options.get("critic_lr") is not None, no_critic),
            "learner.value_init": (not critic and "value_init" in options, no_critic),
            "learner.final_ratio": (constant and "final_ratio" in options, "nothing reads it: schedule is constant"),
            **{
                f"learner.{name}": (not learner.uses_adamw and name in options, "only the optimiser adamw reads it")
                for name in ("betas", "eps")
            },
            "learner.lr": (learner.lr == 0, "0 changes no weight of the policy"),
            "learner.warmup_steps": (
                updates is not None and learner.warmup_steps > updates,
                f"{learner.warmup_steps:,} optimiser steps, but the policy has {updates or 0:,}: the learning rate "
                "never reaches lr",
            ),
        }
    yield from ((path, text) for path, (idle, text) in given.items() if idle)


def _routing_faults(plan: Plan, net: Any, *, trains: bool) -> Iterator[tuple[str, str]]:
    """Yield reasons why the learner cannot replay the engine's choices of experts."""
    other = "or use another correction, such as icepop"
    assert plan.loss.correction is not None
    corrections = plan.loss.correction.singles.values()
    replaying = next(each for each in corrections if plan.plugins.component(each).replays_routing)
    what = f"correction {replaying.name!r} replays the experts that the engine chose"
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
            (found.missing, "tensors of the model that the files lack:"),
            (found.extra, "tensors of the files that the model lacks:"),
            (found.misshapen, "tensors of a different shape:"),
        )
        if names
    ]
    return (
        f"the files of {plan.model.path!r} do not hold what the learner would send to the engines: {'; '.join(parts)}. "
        f"If config.json is right, open the model with transformers ({type(net).__name__}.from_pretrained), look "
        "at its warnings, write it with save_pretrained into a new folder, and train that"
    )


def image_faults(plan: Plan, net: Any | None, tasks: Sequence[Task]) -> Iterator[tuple[str, str]]:
    """Yield reasons why a plan's images are not supported, as (path of the setting, reason).

    Args:
        plan: Checked plan.
        net: The plan's model without its weights; None if it could not be built.
        tasks: Some tasks of each source.
    """
    if plan.config.model.exact and net is not None and sees(net):
        yield "model.exact", f"a {type(net).__name__} reads images, which no exact pass does; leave it out"
    showing = list(_who_shows(plan, tasks))
    if not showing:
        return
    who, _ = showing[0]
    if any(as_text for _, as_text in showing):
        yield "tasks", f"{who} shows images, but the prompt is text, without a chat template; set form: chat"
    try:
        Vision(plan.model).check()
    except ConfigError as error:
        yield from (("model.path", f"{who} shows images: {fault}") for fault in error.faults)
        return
    if not plan.needs_engine or net is None:
        return
    engine = plan.plugins.resolve(plan.engine)
    if not isinstance(engine, ReadsImages):
        yield "engine", f"{who} shows images, which {plan.engine.name!r} does not read; set engine=transformers"
        return
    yield from (("engine", f"{who} shows images: {plan.engine.name!r}: {fault}") for fault in engine.image_faults(net))


def _who_shows(plan: Plan, tasks: Sequence[Task]) -> Iterator[tuple[str, bool]]:
    """Yield the tasks and environments that show images, in words, and True if the conversation begins as text."""
    references = [plan.workflow, *([plan.eval_workflow] if plan.eval_workflow != plan.workflow else [])]
    workflows = [plan.plugins.resolve(each) for each in references]
    for task in tasks:
        as_text = isinstance(task.prompt, str)
        if not isinstance(task.prompt, str) and any(message.images for message in task.prompt):
            yield f"task {task.id!r}", as_text
            continue
        for workflow in workflows:
            if isinstance(workflow, PlaysEpisodes) and (name := _environment_that_shows(plan, workflow, task)):
                yield f"environment {name!r}", as_text


def _environment_that_shows(plan: Plan, workflow: PlaysEpisodes, task: Task) -> str:
    try:
        use, _ = workflow.episode(task)
        reference = plan.plugins.reference("environment", use.name, use.options)
        # Created only if it declares images: some are costly.
        if not hasattr(plan.plugins.component(reference).obj, "shows_images"):
            return ""
        environment = plan.plugins.resolve(reference)
    except RlsdkError:
        return ""  # reported elsewhere
    return use.name if isinstance(environment, ShowsImages) and environment.shows_images else ""


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
    elif plan.whole_groups:
        name = plan.loss.policy_loss.name
        yield "algorithm", f"{why} computes one rollout at a time, but {name!r} compares the rollouts of a group"
    if config.rollout.runs_ahead or config.rollout.replay.share:
        yield (
            "rollout",
            f"{why}: tokens of older weights have different logprobs; train synchronously and each group once "
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
