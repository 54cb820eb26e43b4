"""Checks of a plan's ranks, and of the models that they hold beside the policy: critic and reference."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import attrs

from rlsdk.config import Plan
from rlsdk.contracts import (
    AdaptsEntropy,
    ApartRole,
    GivesPrimitives,
    Model,
    MovesReference,
    SharesSequences,
)
from rlsdk.conversion import without_weights
from rlsdk.engines.pretrained import open_tokenizer
from rlsdk.errors import first_line
from rlsdk.learners.base import TransformersLearner
from rlsdk.learners.options import NO_FLOAT16, LearnerOptions
from rlsdk.plurals import counted
from rlsdk.schedules import EntropyTarget


def rank_faults(plan: Plan) -> Iterator[tuple[str, str]]:
    """Yield, by setting, reasons why ranks cannot share rollouts, or hold their models."""
    groups = [("placement.learners", plan.learner, plan.config.placement.learners)]
    groups += [(f"{role}.ranks", own, getattr(plan.config, role).ranks) for role, own in plan.apart.items()]
    for path, reference, ranks in groups:
        learner = plan.plugins.resolve(reference)
        size = learner.sequence_parallel if isinstance(learner, SharesSequences) else 1
        if ranks % size:
            several = (
                f"{size} ranks of {reference.name!r} share rollouts, so it needs a multiple of {size}; got {ranks}"
            )
            fitting = " or ".join(str(n) for n in (ranks - ranks % size, ranks - ranks % size + size) if n)
            # By convention, options that divide a model or its rollouts among ranks end in _parallel.
            names = [o.name for o in plan.plugins.component(reference).options if o.name.endswith("_parallel")]
            asked = [f"{name}={getattr(learner, name, 1)}" for name in names if getattr(learner, name, 1) != 1]
            instead = f", or change the learner's {' and '.join(asked)}" if asked else ""
            yield path, f"{several}; set {path}={fitting}{instead}"
        if path != "placement.learners" and not isinstance(learner, TransformersLearner):
            role, alone = path.partition(".")[0], f"the learner {reference.name!r} always holds a policy"
            yield path, f"{alone}, and cannot run the {role} by itself; set {path}=0, or {role}.learner=deepspeed"
    warmup, together = plan.config.critic.warmup_steps, plan.plugins.resolve(plan.learner)
    adapts = isinstance(together, AdaptsEntropy) and together.adapts_entropy
    if isinstance(plan.loss.entropy_coef, EntropyTarget) and not adapts:
        yield (
            "algorithm.entropy_coef",
            f"a target given, but the learner {plan.learner.name!r} is not known to measure the entropy and adapt the "
            "weight to it; give a number or a schedule, or use a learner such as deepspeed (one that does declares "
            "rlsdk.contracts.AdaptsEntropy)",
        )
    if warmup and "critic" not in plan.apart and not isinstance(together, GivesPrimitives):
        yield (
            "critic.warmup_steps",
            f"{warmup} given, but the learner {plan.learner.name!r} cannot train the critic without the actor, since "
            "it lacks the methods of rlsdk.contracts.GivesPrimitives; leave it out, use a learner such as deepspeed, "
            "or run the critic in its own processes: critic={ranks: 1, learner: deepspeed}",
        )
    models: list[tuple[ApartRole, Model]] = [("critic", plan.critic)] if plan.algorithm.critic else []
    models += [("reference", plan.reference)] if plan.needs_reference else []
    for role, model in models:
        if model.path != plan.model.path:
            yield from _config_faults(plan, role, model)
            yield from _backbone_faults(plan, role, model)
    if plan.algorithm.critic and plan.config.critic.dtype == "float16":
        yield "critic.dtype", NO_FLOAT16.replace("model.dtype", "critic.dtype")
    if plan.needs_reference:
        yield from _moving_faults(plan)


def _config_faults(plan: Plan, role: str, model: Model) -> Iterator[tuple[str, str]]:
    """Yield why a critic or reference cannot be read, or cannot read the policy's text."""
    from rlsdk.learners.model import read_config

    folder = Path(os.path.expanduser(model.path))
    try:
        config = read_config(model, local_files_only=True)
    except (OSError, ValueError) as error:
        if not folder.is_dir():
            return  # a model of the hub: another check reports it
        held = (folder / "config.json").is_file()
        why = first_line(error) if held else "it has no config.json"
        adapter = not held and (folder / "adapter_config.json").is_file()
        merged = ", only an adapter: give the folder of the merged model, such as the export of its run"
        yield f"model.{role}", f"{model.path!r} holds no model that can be read: {why}{merged if adapter else ''}"
        return
    try:
        tokenizer = open_tokenizer(plan.model)
    except (OSError, ValueError):  # other checks report it
        return
    tokens = len(tokenizer)
    known = int(config.get_text_config().vocab_size)
    if known < tokens:
        yield (
            f"model.{role}",
            f"{model.path} has embeddings of {known} tokens, and the tokenizer of the model that is trained has "
            f"{tokens}: it cannot read everything that the policy may write; use a model with the same tokenizer",
        )
    elif role == "reference" and folder.is_dir():
        yield from _tokenizer_faults(tokenizer, model)


def _tokenizer_faults(tokenizer: Any, reference: Model) -> Iterator[tuple[str, str]]:
    """Yield why a reference model would read other text than the policy wrote, if its folder has its own tokenizer."""
    try:
        own = open_tokenizer(attrs.evolve(reference, tokenizer=None))
    except (OSError, ValueError):  # a folder without a tokenizer
        return
    # Models of one family may name added tokens, such as those of a chat template, differently.
    added = {*tokenizer.get_added_vocab().values(), *own.get_added_vocab().values()}
    ours, theirs = ({i: text for text, i in each.get_vocab().items()} for each in (tokenizer, own))
    differing = sorted(i for i in ours.keys() & theirs.keys() - added if ours[i] != theirs[i])
    if differing:
        first, count = differing[0], counted(len(differing), "token")
        yield (
            "model.reference",
            f"{reference.path} has another tokenizer than the model that is trained: in {count} they "
            f"differ, such as {first}, {ours[first]!r} for the policy and {theirs[first]!r} for the reference model, "
            "which would rate other text than the policy wrote; use a model with the same tokenizer",
        )


def _backbone_faults(plan: Plan, role: ApartRole, model: Model) -> Iterator[tuple[str, str]]:
    """Yield reasons why a critic or reference cannot run on the learner's rows; nothing if it is not available."""
    reference = plan.apart.get(role, plan.learner)
    learner = plan.plugins.resolve(reference)
    if not isinstance(learner, LearnerOptions):
        return
    from rlsdk.learners.model_faults import backbone_faults

    try:
        net = without_weights(model, local_files_only=True)
    except (OSError, ValueError):  # other checks report it
        return
    faults = backbone_faults(net, learner.attention, learner.rows, without_mask=learner.packs_without_mask)
    yield from ((f"model.{role}", f"{reference.name!r}: {fault}") for fault in faults)


def _moving_faults(plan: Plan) -> Iterator[tuple[str, str]]:
    """Yield reasons why the reference model of a plan cannot follow the policy, if it is meant to."""
    path, learner = "reference.update_every", plan.plugins.resolve(plan.learner)
    if not plan.config.reference.update_every:
        return
    if not isinstance(learner, MovesReference):
        text = f"the learner {plan.learner.name!r} cannot move its reference model (rlsdk.contracts.MovesReference)"
        yield path, f"{text}; set learner=deepspeed, or leave update_every out"
        return
    yield from ((path, f"{plan.learner.name!r}: {fault}") for fault in learner.reference_faults())
    if plan.reference.path == plan.model.path:
        return
    try:
        policy, reference = (
            {
                name: tuple(tensor.shape)
                for name, tensor in without_weights(model, local_files_only=True).named_parameters()
            }
            for model in (plan.model, plan.reference)
        )
    except (OSError, ValueError):  # other checks report it
        return
    differing = [name for name in {**policy, **reference} if policy.get(name) != reference.get(name)]
    if differing:
        name, count = differing[0], counted(len(differing), "tensor")
        theirs, ours = (str(list(shapes[name])) if name in shapes else "missing" for shapes in (reference, policy))
        yield (
            "model.reference",
            f"{plan.reference.path}: its weights cannot be mixed with those of the model that is trained: {count} "
            f"of different name or shape, such as {name}, {theirs} there and {ours} in the policy; use a model of the "
            "same architecture and size, or leave reference.update_every out",
        )
