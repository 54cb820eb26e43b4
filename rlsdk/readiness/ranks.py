"""Checks of the learner's ranks, and of models beside the policy, made before anything starts."""

from __future__ import annotations

from collections.abc import Iterator

from rlsdk.config import Plan
from rlsdk.contracts import Model, SharesSequences
from rlsdk.engines.common import open_tokenizer
from rlsdk.learners.base import TransformersLearner
from rlsdk.learners.options import NO_FLOAT16


def rank_faults(plan: Plan) -> Iterator[tuple[str, str]]:
    """Say, by setting, why ranks cannot share rollouts, or hold the models that they should."""
    groups = [("placement.learners", plan.learner, plan.config.placement.learners)]
    groups += [(f"{role}.ranks", own, getattr(plan.config, role).ranks) for role, own in plan.apart.items()]
    for path, reference, ranks in groups:
        learner = plan.plugins.resolve(reference)
        size = learner.sequence_parallel if isinstance(learner, SharesSequences) else 1
        if ranks % size:
            several = f"{size} ranks of {reference.name!r} share rollouts"
            yield path, f"{several}, so it needs a multiple of {size}; got {ranks}"
        if path != "placement.learners" and not isinstance(learner, TransformersLearner):
            role, alone = path.partition(".")[0], f"the learner {reference.name!r} always holds a policy"
            yield path, f"{alone}, and cannot run the {role} by itself; set {path}=0, or {role}.learner=deepspeed"
    if plan.algorithm.critic:
        yield from _model_faults(plan, "critic", plan.critic)
        if plan.config.critic.dtype == "float16":
            yield "critic.dtype", NO_FLOAT16.replace("model.dtype", "critic.dtype")
    if plan.needs_reference:
        yield from _model_faults(plan, "reference", plan.reference)


def _model_faults(plan: Plan, role: str, model: Model) -> Iterator[tuple[str, str]]:
    """Say why a model cannot read what the policy writes; nothing where it is not on this machine."""
    if model.path == plan.model.path:
        return
    from rlsdk.learners.model import read_config

    try:
        config = read_config(model, local_files_only=True)
        tokens = len(open_tokenizer(plan.model))
    except (OSError, ValueError):  # the other checks report it
        return
    known = int(config.get_text_config().vocab_size)
    if known < tokens:
        yield (
            f"model.{role}",
            f"{model.path} has embeddings of {known} tokens, and the tokenizer of the model that is trained has "
            f"{tokens}: it cannot read all that the policy may write; take a model with the same tokenizer",
        )
