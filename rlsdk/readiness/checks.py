"""Checks of a plan that need its data, its model or this machine, made before anything starts.

`rlsdk explain` shows the findings; `rlsdk train` refuses to start if there are faults or warnings.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import suppress
from itertools import chain, starmap
from typing import Any

import attrs

from rlsdk import preflight
from rlsdk.cluster.gpus import ROLES, GPUNode
from rlsdk.cluster.placement import gpu_map
from rlsdk.config import Plan
from rlsdk.config.groups import ignores_updates
from rlsdk.config.rules import steps_of_epochs
from rlsdk.config.schema import EvalSection
from rlsdk.contracts import (
    GivesRankTensors,
    OnlySamples,
    Requires,
    RequiresPrograms,
    SendsFromEachRank,
    SpansGPUs,
    StreamsTensors,
    UsesGPUs,
)
from rlsdk.conversion import WEIGHT_FILES
from rlsdk.errors import ConfigError, EnvironmentFault, RlsdkError
from rlsdk.learners.base import TransformersLearner
from rlsdk.plugins import ComponentRef, short_name
from rlsdk.plurals import counted
from rlsdk.readiness.base_models import adapter_notes
from rlsdk.readiness.disk import DiskEstimate, estimate, skeleton
from rlsdk.readiness.models import exact_faults, idle_notes, image_faults, length_notes, model_faults
from rlsdk.readiness.roles import rank_faults
from rlsdk.readiness.tasks import PlanChecks, PlanFinding
from rlsdk.readiness.tool_objects import unread_objects
from rlsdk.rollout.codec import ChatTokenizer
from rlsdk.types import Task

ENGINES_PER_CORE = 2
"""Maximum number of engines, or of learner ranks, per CPU core."""

_LEAST_NAMED = 0.9
"""Share of a model's tokens that its tokenizer should have; many models pad their embeddings by a few percent."""


@attrs.frozen
class Readiness:
    """Result of the checks.

    Attributes:
        faults: Problems on any machine.
        warnings: Problems of this machine only.
        notes: Harmless findings that may surprise the user.
        tasks: Tasks of each source in `tasks.train`; empty if not read.
        disk: Required disk space; None if the program has no learner.
        built: The model without its weights; None, and the reason, if it cannot be built.
    """

    faults: tuple[PlanFinding, ...] = ()
    warnings: tuple[PlanFinding, ...] = ()
    notes: tuple[PlanFinding, ...] = ()
    tasks: tuple[Sequence[Task], ...] = ()
    disk: DiskEstimate | None = None
    built: tuple[Any, str] = (None, "")

    def require(self) -> Readiness:
        """Return this result if the run can start here.

        Raises:
            ConfigError: There are faults.
            EnvironmentFault: There are only warnings.
        """
        if self.faults:
            raise ConfigError(map(str, self.faults))
        preflight.require(map(str, self.warnings))
        return self


def machine(plan: Plan, *, trains: bool = True, devices: bool = True) -> list[PlanFinding]:
    """Check that this machine has the devices, packages, programs and models that a plan needs.

    Args:
        plan: Checked plan.
        trains: True for a program with a learner, which writes checkpoints, and with trackers.
        devices: Check GPUs and cores; false if the plan is for other machines.
    """
    found = [PlanFinding("placement.device", text) for text in preflight.torch_companions()]
    found += _devices(plan, trains=trains) if devices else []
    return [*found, *_models(plan, trains=trains), *_requirements(plan, trains=trains)]


def space(plan: Plan, disk: DiskEstimate) -> list[PlanFinding]:
    """Check that a run's folder lasts, and that there is the disk space that the run needs."""
    found = [*preflight.lasting(plan.folder), *preflight.free_space(plan.folder, disk.needed)]
    return [PlanFinding("out", text) for text in found]


def _devices(plan: Plan, *, trains: bool) -> Iterator[PlanFinding]:
    """Check GPUs, cores and limits, unless a cluster of other machines provides them."""
    place = plan.config.placement
    if place.device != "cpu":
        yield from (PlanFinding("placement.device", text) for text in preflight.gpu_capability())
    elsewhere = bool(place.ray or os.environ.get("RAY_ADDRESS"))
    gpus, cores = preflight.gpu_count() if place.device != "cpu" else 0, os.cpu_count() or 1
    on_cpu = place.device == "cpu" or (place.device == "auto" and not gpus and not elsewhere)
    if trains and plan.needs_engine and on_cpu and _device_of_transfer(plan) == "cuda":
        yield PlanFinding(
            "rollout.weight_transfer",
            f"{plan.weight_transfer.name!r} sends weights from GPU to GPU, but this run uses none; use gloo, "
            "shared_memory or object_store",
        )
    if elsewhere:
        return
    yield from (PlanFinding("placement", text) for text in [*preflight.open_files(), *preflight.file_size()])
    if place.device == "cuda" or gpus:
        for text in gpu_faults(plan, [GPUNode("this machine", gpus)], trains=trains):
            yield PlanFinding("placement.device", f"{text}; set placement.device=cpu, or train where the GPUs are")
    yield from _reward_gpus(plan, gpus, trains=trains)
    counts = {"engines": place.engines if plan.needs_engine else 0, "learners": place.learners if trains else 0}
    for name, count in counts.items():
        if count > ENGINES_PER_CORE * cores:
            yield PlanFinding(
                f"placement.{name}",
                f"{count} {name} on {cores} CPU cores: each is a process that computes constantly, and a core can "
                f"serve {ENGINES_PER_CORE}; give at most {ENGINES_PER_CORE * cores}",
            )


def _reward_gpus(plan: Plan, gpus: int, *, trains: bool) -> Iterator[PlanFinding]:
    """Report rewards whose actors would wait forever for GPUs that engines and learner do not leave free.

    Args:
        plan: Checked plan.
        gpus: GPUs of this machine that engines and learner may use.
        trains: True for a program with a learner.
    """
    rewards = [(each.rule.name, plan.plugins.resolve(each.reference)) for each in plan.rewards]
    wanted = {name: float(reward.gpus) for name, reward in rewards if isinstance(reward, UsesGPUs) and reward.gpus > 0}
    if not wanted:
        return
    taken = 0
    if gpus:
        with suppress(EnvironmentFault):  # reported by gpu_faults
            rows = gpu_map(plan, [GPUNode("this machine", gpus)], ROLES if trains else ("engine",)).rows()
            taken = sum(bool(users) for _, _, users in rows)
    there = preflight.gpu_count()
    if sum(wanted.values()) > there - taken:
        asked = ", ".join(f"{name} {count:g}" for name, count in wanted.items())
        yield PlanFinding(
            "reward",
            f"its actors reserve GPUs of their own ({asked}), but this machine has {there}, of which engines and "
            f"learner take {taken}; set gpus: 0 to score on the CPU, or train where there are more GPUs",
        )


def _device_of_transfer(plan: Plan) -> str:
    transfer = plan.plugins.resolve(plan.weight_transfer)
    return transfer.device if isinstance(transfer, StreamsTensors) else "cpu"


def gpu_faults(plan: Plan, nodes: Sequence[GPUNode], *, trains: bool = True) -> list[str]:
    """Return why the actors of a plan cannot be placed on the GPUs of given nodes, or share them; empty if they can."""
    place, faults = plan.config.placement, []
    engine = plan.plugins.resolve(plan.engine)
    if plan.needs_engine and isinstance(engine, SpansGPUs) and engine.gpus != place.gpus_per_engine:
        faults.append(
            f"each engine divides its model among {counted(engine.gpus, 'GPU')} (engine.tensor_parallel_size), but is "
            f"given {place.gpus_per_engine} (placement.gpus_per_engine); set both to the same number"
        )
    if trains and plan.needs_engine and place.colocate and plan.config.rollout.runs_ahead:
        faults.append("rollouts cannot run ahead of a learner on their own GPUs; set placement.colocate=false")
    if trains and plan.needs_engine and _device_of_transfer(plan) == "cuda":
        faults += _transfer_faults(plan)
    try:
        gpu_map(plan, nodes, ROLES if trains else ("engine",))
    except EnvironmentFault as fault:
        faults.append(str(fault))
    return faults


def _transfer_faults(plan: Plan) -> Iterator[str]:
    """Return why a weight transfer between GPUs does not fit a plan's placement."""
    place, name = plan.config.placement, f"rollout.weight_transfer={plan.weight_transfer.name}"
    if not isinstance(plan.plugins.resolve(plan.weight_transfer), SendsFromEachRank):
        if place.colocate:
            yield (
                f"{name} sends weights from GPU to GPU, but engines and learner share theirs; set "
                "placement.colocate=false, or use cuda_ipc, shared_memory or object_store"
            )
        return
    if not place.colocate:
        yield (
            f"{name} shares memory of GPUs that engines and learner share, but theirs are separate; set "
            "placement.colocate=true, or use nccl or object_store"
        )
    elif place.gpus_per_engine > 1 or place.engines > place.learners:
        yield (
            f"{name} needs a learner rank on the GPU of each engine, and one GPU for each engine; given "
            f"{counted(place.engines, 'engine')} with {counted(place.gpus_per_engine, 'GPU')} each and "
            f"{counted(place.learners, 'learner rank')}; set placement.gpus_per_engine=1 and at least as many "
            "placement.learners as engines, or use shared_memory or object_store"
        )


def _rank_transfer_faults(plan: Plan) -> Iterator[PlanFinding]:
    """Report a weight transfer in which every rank sends, and a learner that has the whole weights on rank 0 alone."""
    transfer, learner = plan.plugins.resolve(plan.weight_transfer), plan.plugins.resolve(plan.learner)
    if isinstance(transfer, SendsFromEachRank) and not isinstance(learner, GivesRankTensors):
        yield PlanFinding(
            "rollout.weight_transfer",
            f"{plan.weight_transfer.name!r} sends from every rank, but the learner {plan.learner.name!r} yields its "
            "weights on rank 0 alone (it has no rank_weight_tensors); use object_store, gloo or shared_memory",
        )


def _loads(plan: Plan, *, trains: bool) -> bool:
    """Return whether a program loads its model with transformers to train it."""
    return trains and isinstance(plan.plugins.resolve(plan.learner), TransformersLearner)


def _models(plan: Plan, *, trains: bool) -> Iterator[PlanFinding]:
    section = plan.config.model
    loads = _loads(plan, trains=trains)
    others = [*(["reference"] if plan.needs_reference else []), *(["critic"] if plan.algorithm.critic else [])]
    asked: dict[str, list[str]] = {}  # hub id -> faults
    for key in ("path", "tokenizer", *others):
        if not (name := getattr(section, key)):
            continue
        if not os.path.isdir(folder := os.path.expanduser(name)):
            if name not in asked:
                asked[name] = preflight.hub_model(name)
            faults = asked[name]
            yield from (PlanFinding(f"model.{key}", text) for text in faults)
            if faults or not preflight.hub_is_offline():
                continue
            folder = preflight.cached_folder(name)
        if (
            loads
            and key != "tokenizer"
            and not any(os.path.exists(os.path.join(folder, each)) for each in chain(*WEIGHT_FILES))
        ):
            yield PlanFinding(
                f"model.{key}",
                f"{name} has no weights for the learner (expected model.safetensors, or its index); download or copy "
                "the whole model, or create a small one with `rlsdk model new nano`",
            )


def _requirements(plan: Plan, *, trains: bool) -> Iterator[PlanFinding]:
    """Check for packages and programs that components need with the given options."""
    used: list[tuple[str, ComponentRef]] = [("engine", plan.engine)] if plan.needs_engine else []
    if trains:
        used += [("learner", plan.learner), *((f"{role}.learner", own) for role, own in plan.apart.items())]
        used += [("trackers", tracker) for tracker in plan.trackers]
    for path, reference in used:
        component = plan.plugins.resolve(reference)
        what = f"{reference.kind} {reference.name} with these options"
        if isinstance(component, Requires):
            yield from (PlanFinding(path, text) for text in preflight.packages(component.requires, what))
        if isinstance(component, RequiresPrograms):
            yield from (PlanFinding(path, text) for text in preflight.programs(component.programs, what))


def examine(plan: Plan, *, trains: bool = True, starts: bool = True, devices: bool = True) -> Readiness:
    """Check a plan's data, tokenizer and machine, without starting anything.

    Args:
        plan: Checked plan.
        trains: True for a program that has a learner.
        starts: True if a run follows. Otherwise slow checks are skipped: large files are not read, and nothing is
            downloaded.
        devices: Check this machine's GPUs and cores; false if the plan is for other machines.
    """
    found = PlanChecks(plan, starts)
    found.warnings += machine(plan, trains=trains, devices=devices)
    if trains and plan.needs_engine:
        found.fault("engine", *training_faults(plan))
        found.faults += _rank_transfer_faults(plan)
    if trains:
        found.faults += starmap(PlanFinding, rank_faults(plan))
        found.notes += starmap(PlanFinding, chain(idle_notes(plan), _part_notes(plan), adapter_notes(plan)))
    found.faults += starmap(PlanFinding, unread_objects(plan))
    codec = found.codec()
    net, _ = built = skeleton(plan, download=starts)
    _check_model(found, built, codec, trains=trains)
    tasks = [
        found.source(f"tasks.{section}" + (f"[{i}]" if len(sources) > 1 else ""), source, codec)
        for section, sources in (("train", plan.tasks_train), ("eval", plan.tasks_eval))
        for i, source in enumerate(sources)
    ]
    if found.sources and all(each is not None for each in tasks):
        found.unmet_sources()
    trained = [each for each in tasks[: len(plan.tasks_train)] if each is not None]
    firsts = [each[0] for each in tasks if each]
    found.faults += starmap(PlanFinding, image_faults(plan, net, firsts))
    disk = None
    if trains:
        count = sum(map(len, trained)) if len(trained) == len(plan.tasks_train) else None
        disk = estimate(plan, tasks=count, built=built)
        found.warnings += space(plan, disk)
        _check_steps(found, count)
        if count and count < plan.config.batch_size:
            text = f"{counted(count, 'task')}, fewer than batch_size={plan.config.batch_size}: some repeat in a step"
            found.note("tasks.train", text)
    if not plan.tasks_eval:
        found.notes += _idle_evaluation(plan.config.eval)
    return Readiness(
        faults=tuple(found.faults),
        warnings=tuple(found.warnings),
        notes=tuple(found.notes),
        tasks=tuple(trained),
        disk=disk,
        built=built,
    )


def _check_model(found: PlanChecks, built: tuple[Any, str], codec: ChatTokenizer | None, *, trains: bool) -> None:
    """Check the model of a plan, built without weights, together with its tokenizer."""
    plan, (net, why) = found.plan, built
    if net is not None:
        found.vocabulary = vocabulary = getattr(net.config.get_text_config(), "vocab_size", sys.maxsize)
        if codec is not None:
            text = f"the tokenizer {codec.name!r} has {codec.size} tokens, and the model has embeddings of {vocabulary}"
            if codec.size > vocabulary:
                found.note(found.tokenizer, f"{text}: prompts with one of the others are refused")
            elif vocabulary != sys.maxsize and codec.size < _LEAST_NAMED * vocabulary:
                found.note(found.tokenizer, f"{text}: when the policy samples one of the others, it adds no text")
        found.unreachable_ends()
        found.faults += starmap(PlanFinding, model_faults(plan, net, trains=trains))
        found.notes += starmap(PlanFinding, length_notes(plan, net))
    elif _loads(plan, trains=trains) and os.path.isdir(plan.model.path) and not found.of_model:
        found.fault("model.path", f"{why}; correct config.json, or use another model")
    found.faults += starmap(PlanFinding, exact_faults(plan, net))


def _idle_evaluation(section: EvalSection) -> Iterator[PlanFinding]:
    """Note settings of evaluations without held-out tasks, except those that turn evaluations off."""
    usual = EvalSection()
    for name in (field.name for field in attrs.fields(EvalSection) if field.name not in ("before", "after")):
        if (value := getattr(section, name)) != getattr(usual, name):
            given = "given" if attrs.has(type(value)) else "false" if value is False else value
            yield PlanFinding(f"eval.{name}", f"{given}, but nothing is evaluated, since there are no tasks.eval")


def _check_steps(found: PlanChecks, tasks: int | None) -> None:
    """Check what must fit into the steps of a run; nothing if they depend on tasks whose number is not known."""
    plan, config = found.plan, found.plan.config
    steps = config.steps if config.steps is not None else steps_of_epochs(config, tasks) if tasks else None
    if not steps:
        return
    warmup, every = config.critic.warmup_steps, config.reference.update_every
    if warmup and warmup >= steps:
        found.fault(
            "critic.warmup_steps",
            f"{warmup} of {counted(steps, 'step')} would train the critic alone, so the actor would never be trained; "
            "give fewer than the run has",
        )
    if every and every >= steps:
        found.note(
            "reference.update_every",
            f"{every}, but the run has {counted(steps, 'step')}: no step is trained with a reference model that has "
            "moved",
        )
    # Learning-rate schedules that fail at the first or the last optimiser step of the policy or the critic.
    trained = [("learner.schedule", plan.learner, steps - warmup)]
    if plan.algorithm.critic:
        apart = plan.apart.get("critic", plan.learner)
        trained.append((f"{'critic.' if apart != plan.learner else ''}learner.schedule", apart, steps))
    faults: dict[str, str] = {}
    for path, reference, count in trained:
        learner = plan.plugins.resolve(reference)
        if not isinstance(learner, TransformersLearner) or count <= 0:
            continue
        updates = count * config.updates
        factor = learner.rate_factor(updates)
        try:
            for done in (min(learner.warmup_steps, updates - 1), updates - 1):
                factor(done)
        except RlsdkError as error:
            faults.setdefault(path, str(error))
    for path, text in faults.items():
        found.fault(path, text)


def _part_notes(plan: Plan) -> Iterator[tuple[str, str]]:
    """Note parts of the algorithm that may not do what the rest of a plan expects of them."""
    config, loss = plan.config, plan.loss.policy_loss
    if config.updates > 1 and plan.sampled and ignores_updates(plan.plugins.resolve(loss)):
        yield (
            "algorithm.policy_loss",
            f"{short_name(loss.name)} learns as if the current policy had sampled its batch, which is true only of the "
            f"first of {config.updates} optimiser steps per batch (minibatches × passes); set both to 1, or use a loss "
            "with a ratio of policies, such as 'ppo'",
        )
    if config.rollout.dynamic_sampling and plan.sampled and not plan.filters:
        yield (
            "rollout.dynamic_sampling",
            "without filters, it replaces only groups that cannot be trained at all; name one in algorithm.filters, "
            "such as 'nonzero_variance'",
        )


def training_faults(plan: Plan) -> Sequence[str]:
    """Return why the samples of a plan's engine cannot be trained on; empty if they can."""
    engine = plan.plugins.resolve(plan.engine)
    return engine.training_faults() if isinstance(engine, OnlySamples) else []
