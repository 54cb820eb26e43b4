"""Describe a plan: what it runs, and how its batches are divided."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from math import ceil
from typing import Any

from rlsdk import preflight
from rlsdk.components import Use, brief
from rlsdk.config import Plan, TaskSource
from rlsdk.contracts import LimitsMicroBatches, RewardSpec, SharesSequences
from rlsdk.plugins import ComponentRef, short_name
from rlsdk.plurals import counted, every
from rlsdk.readiness.tasks import PlanFinding
from rlsdk.storage.location import is_url

NEVER_RUN = (
    "the learner on CUDA, its collectives over NCCL",
    "the engine on CUDA, and its weights taken from the learner there",
)
"""CUDA features that have never been run, as listed in docs/gpu.md."""


def finding_of(fault: str) -> PlanFinding:
    """Split a configuration fault into its path, if its text begins with one, and its message."""
    parts = re.fullmatch(r"([\w.\[\]-]+): (.*)", fault, re.DOTALL)
    return PlanFinding(*parts.groups()) if parts else PlanFinding("", fault)


def describe(plan: Plan) -> dict[str, dict[str, Any]]:
    """Describe the run of a plan: section -> name -> text, flag or list of texts."""
    config = plan.config
    updates = counted(config.updates, "optimiser step")
    rollouts = counted(config.group_size, "rollout") if plan.sampled else "their demonstrations"
    mixed = plan.algorithm.rollouts == "mixed"
    length = counted(config.steps, "step") if config.steps is not None else counted(config.epochs or 0, "epoch")
    warmup = config.critic.warmup_steps
    recomputes = config.old_logprobs == "learner" or mixed
    passes = [  # models that read each batch once more before the learner trains on it
        *(["the actor (old logprobs)"] if plan.sampled and recomputes else []),
        *(["the reference model"] if plan.needs_reference else []),
        *(["the critic"] if plan.algorithm.critic else []),
    ]
    return {
        "run": {
            "folder": plan.location,
            **({"mirror": str(plan.folder)} if is_url(plan.config.out) else {}),
            "length": length,
            "each step": f"{counted(config.batch_size, 'task')} × {rollouts}, "
            + ("and their demonstrations, " if mixed else "")
            + updates,
            "seed": config.seed,
        },
        "model": {"path": config.model.path, "dtype": config.model.dtype, "max_length": config.model.max_length},
        "algorithm": _algorithm(plan),
        "rollouts": {
            "tasks": _sources(plan.tasks_train),
            "held-out tasks": _sources(plan.tasks_eval),
            "workflow": component_text(plan.workflow),
            "rewards": [_part(part.rule, part.reference) for part in plan.rewards],
            "renderer": component_text(plan.renderer),
            **({"tool calls": component_text(plan.tool_parser)} if plan.tool_parser is not None else {}),
            **({"sampler": component_text(plan.sampler)} if plan.sampler is not None else {}),
            "buffer": component_text(plan.buffer),
            "engine": component_text(plan.engine) if plan.needs_engine else "none: nothing is generated",
            "rollouts run in": counted(config.rollout.workers, "rollout worker")
            if config.rollout.workers
            else "the driver's process",
        },
        **_around(plan),
        "learner": {
            "learner": component_text(plan.learner),
            "reference model": plan.needs_reference,
            "critic": plan.algorithm.critic,
            "passes before the update": passes or "none",
            **({"critic warm-up": f"{counted(warmup, 'step')}, in which the actor is not trained"} if warmup else {}),
            "computed fields": sorted(plan.needs),
        },
        "placement": _placement(plan),
        "plugins": {
            name: f"{mark['distribution'] or 'file'} {mark['version']} {mark['source'][:12]}".replace("  ", " ")
            for name, mark in plan.code.items()
        },
    }


def _around(plan: Plan) -> dict[str, dict[str, Any]]:
    """Describe the parts around the steps: sampling, evaluation, checkpoints, trackers."""
    config, evaluation, saved = plan.config, plan.config.eval, plan.config.checkpoint
    times = [
        *(["before the first step"] if evaluation.before else []),
        *([every(evaluation.every, "step")] if evaluation.every else []),
        *(["after the last step"] if evaluation.after else []),
    ]
    limit = f", {counted(evaluation.limit, 'task')} of each source" if evaluation.limit else ""
    how = [f"temperature {evaluation.temperature:g}"]
    how += [f"top_p {evaluation.top_p:g}"] if evaluation.top_p < 1 else []
    how += [f"top_k {evaluation.top_k}"] if evaluation.top_k else []
    greedy = "one greedy, " if evaluation.greedy else ""
    answers = f"{greedy}{evaluation.samples} sampled for each task ({', '.join(how)})"
    sampling = {
        "temperature": config.sampling.temperature,
        "longest answer": counted(config.sampling.max_tokens, "token"),
        "longest prompt": f"{counted(config.max_prompt_tokens, 'token')}; longer ones are "
        + ("dropped" if config.long_prompts == "drop" else "an error"),
        **({"stop": [json.dumps(text) for text in config.sampling.stop]} if config.sampling.stop else {}),
    }
    return {
        **({"sampling": sampling} if plan.sampled else {}),
        "evaluation": {
            "when": f"{', '.join(times)}{limit}" if plan.tasks_eval and times else "never",
            **({"answers": answers} if plan.tasks_eval else {}),
            **({"workflow": component_text(plan.eval_workflow)} if plan.eval_workflow != plan.workflow else {}),
        },
        "checkpoint": {
            "saved": f"{every(saved.every, 'step')} and after the last step" if saved.every else "after the last step",
            "kept": saved.keep,
            "exported": {"last": "the last one", "every": "every one", "never": "none"}[saved.export],
            "rollouts": every(config.save_rollouts, "step") if config.save_rollouts else "not saved",
        },
        "trackers": {"metrics": ["metrics.jsonl", *(component_text(tracker) for tracker in plan.trackers)]},
    }


def _algorithm(plan: Plan) -> dict[str, Any]:
    algorithm, loss = plan.algorithm, plan.loss
    coefficients = {
        name: loss.entropy_coef if name == "entropy_coef" else plan.schedules.get(name, getattr(algorithm, name))
        for name in ("kl_coef", "entropy_coef", "value_clip", "norm")
        if getattr(algorithm, name) or name == "kl_coef"
    }
    if (share := algorithm.top_entropy_quantile) is not None:  # 0: the highest entropy alone
        coefficients["top_entropy_quantile"] = plan.schedules.get("top_entropy_quantile", share)
    sets = {"sets elsewhere": [f"{path}={brief(value)}" for path, value in plan.defaulted.items()]}
    return {
        "name": brief(plan.config.algorithm.name),
        "shaping": [component_text(part) for part in plan.shaping],
        "advantage": component_text(plan.advantage),
        "policy_loss": component_text(loss.policy_loss),
        "correction": component_text(loss.correction)
        if loss.correction is None or not loss.correction.parts
        else [component_text(part) for part in loss.correction.parts],
        "kl": component_text(loss.kl),
        **coefficients,
        "aggregate": algorithm.aggregate,
        "filters": [component_text(part) for part in plan.filters],
        **(sets if plan.defaulted else {}),
    }


def _sources(sources: Sequence[TaskSource]) -> str | list[str]:
    texts = [component_text(s.reference) + (f", weight {s.weight:g}" if len(sources) > 1 else "") for s in sources]
    return "none" if not texts else texts[0] if len(texts) == 1 else texts


def component_text(reference: ComponentRef | None) -> str:
    """Return a component as `NAME(option=value, …)`."""
    if reference is None:
        return "none"
    return brief(Use(short_name(reference.name), reference.options))


def _placement(plan: Plan) -> dict[str, Any]:
    place = plan.config.placement
    engines = place.engines if plan.needs_engine else 0
    apart = "on the same devices" if place.colocate else "on their own devices"
    cuda = place.device == "cuda" or (place.device == "auto" and preflight.gpu_count() > 0)
    learner = plan.plugins.resolve(plan.learner)
    together = learner.sequence_parallel if isinstance(learner, SharesSequences) else 1
    ranks = f"{place.learners}, in groups of {together} that run rollouts together" if together > 1 else place.learners
    never_run = [*NEVER_RUN[: 2 if plan.needs_engine else 1]]
    if place.gpus_per_engine > 1:
        never_run.append(f"tensor parallelism over {place.gpus_per_engine} GPUs")
    if place.colocate and plan.needs_engine:
        never_run.append("engines asleep while the learner works")
    return {
        "device": f"{place.device}{'' if place.device != 'auto' else ' (cuda here)' if cuda else ' (cpu here)'}",
        "engines": f"{engines}, {counted(place.gpus_per_engine, 'GPU')} each" if cuda else engines,
        "learner ranks": f"{ranks}, {apart}" if engines else ranks,
        **({"never run": never_run} if cuda else {}),
    }


def _part(rule: RewardSpec, reference: ComponentRef) -> str:
    """Describe a part of the reward and how it is combined with the others."""
    details = [
        f"values from {rule.range[0]:g} to {rule.range[1]:g}" if rule.range else "",
        f"gate at {rule.gate:g}" if rule.gate is not None else "",
        f"for {', '.join(rule.sources)}" if rule.sources else "",
    ]
    head = "factor" if rule.multiply else f"{rule.weight:g} ×"
    return ", ".join([f"{head} {component_text(reference)}", *filter(None, details)])


def batch(plan: Plan) -> dict[str, str]:
    """Describe how the tasks of a step are divided into optimiser steps: name -> sentence."""
    config, place = plan.config, plan.config.placement
    each = config.group_size if plan.sampled else 1
    rollouts = config.batch_size * each
    minibatch = ceil(rollouts / config.minibatches)
    learner = plan.plugins.resolve(plan.learner)
    longest = min(config.model.max_length, config.max_prompt_tokens + config.sampling.max_tokens)
    if not plan.plugins.component(plan.workflow).one_answer:
        longest = config.model.max_length
    share = ceil(minibatch / place.learners)
    words = {
        "rollouts": f"{counted(config.batch_size, 'task')} × {each:,} = {counted(rollouts, 'rollout')} in each step"
        + (f", about {ceil(rollouts / place.engines):,} for each engine ({place.engines})" if plan.sampled else "")
        + f", of at most {longest:,} tokens with their prompts",
        "optimiser steps": f"{counted(rollouts, 'rollout')} / "
        f"{counted(config.minibatches, 'minibatch', 'minibatches')} = {counted(minibatch, 'rollout')} in each "
        f"optimiser step; {config.minibatches} × {counted(config.passes, 'pass', 'passes')} = "
        f"{counted(config.updates, 'optimiser step')} in each step",
        "ranks": f"{counted(minibatch, 'rollout')} / {place.learners} = {counted(share, 'rollout')} on each rank of "
        "the learner",
    }
    if isinstance(learner, LimitsMicroBatches):
        limit = learner.micro_batch_tokens
        exact = "gradients add up over them, so their number changes only speed and memory"
        if config.model.exact:
            words["micro-batches"] = (
                f"each rollout in a forward pass of its own, padded to {config.model.max_length:,} tokens (model.exact)"
            )
        elif limit == "auto":
            words["micro-batches"] = f"as many tokens in a forward pass as fit in the learner's memory; {exact}"
        else:
            most = max(1, min(share, ceil(share * longest / limit)))
            words["micro-batches"] = (
                f"{counted(share, 'rollout')} × {longest:,} tokens in forward passes of at most {limit:,} tokens: at "
                f"full length about {most:,} for each optimiser step; {exact}"
            )
    if plan.plugins.component(plan.loss.policy_loss).whole_batch:
        words["whole batch"] = (
            f"{short_name(plan.loss.policy_loss.name)} reads the whole batch of an optimiser step: one more forward "
            "pass over it, without gradient, before each"
        )
    if config.steps is not None:
        words["whole run"] = (
            f"{counted(config.steps, 'step')}: {counted(config.steps * rollouts, 'rollout')}, "
            f"{counted(config.steps * config.updates, 'optimiser step')}"
        )
    return words
