"""A description of a step in words: rollouts, optimiser steps, micro-batches, memory."""

from __future__ import annotations

from math import ceil

from rlsdk import preflight
from rlsdk.config import Plan
from rlsdk.contracts import LimitsMicroBatches
from rlsdk.readiness.disk import DTYPE_BYTES, DiskEstimate


def batch(plan: Plan) -> dict[str, str]:
    """Describe how the tasks of a step become optimiser steps: name -> sentence."""
    config, place = plan.config, plan.config.placement
    each = config.group_size if plan.sampled else 1
    rollouts = config.batch_size * each
    updates = config.minibatches * config.passes
    minibatch = ceil(rollouts / config.minibatches)
    learner = plan.plugins.resolve(plan.learner)
    longest = min(config.model.max_length, config.max_prompt_tokens + config.sampling.max_tokens)
    if not plan.plugins.component(plan.workflow).one_answer:
        longest = config.model.max_length
    share = ceil(minibatch / place.learners)
    words = {
        "rollouts": f"{config.batch_size:,} tasks × {each:,} = {rollouts:,} rollouts in each step"
        + (f", some {ceil(rollouts / place.engines):,} for each engine ({place.engines})" if plan.sampled else "")
        + f", of at most {longest:,} tokens with their prompts",
        "optimiser steps": f"{rollouts:,} rollouts / {config.minibatches} minibatches = {minibatch:,} rollouts in each "
        f"optimiser step; {config.minibatches} × {config.passes} passes = {updates} optimiser steps in each step",
        "ranks": f"{minibatch:,} rollouts / {place.learners} = {share:,} rollouts on each rank of the learner",
    }
    if isinstance(learner, LimitsMicroBatches):
        limit = learner.micro_batch_tokens
        most = max(1, min(share, ceil(share * longest / limit)))
        words["micro-batches"] = (
            f"{share:,} rollouts × {longest:,} tokens in forward passes of at most {limit:,} tokens: at full length "
            f"some {most:,} for each optimiser step; gradients add up over them, so their number changes "
            "only speed and memory"
        )
    if config.steps is not None:
        words["whole run"] = (
            f"{config.steps:,} steps: {config.steps * rollouts:,} rollouts, {config.steps * updates:,} "
        )
        words["whole run"] += "optimiser steps"
    return words


def memory(plan: Plan, disk: DiskEstimate | None) -> dict[str, str]:
    """Describe the memory that weights and optimiser state take; empty if the model's size is not known."""
    if disk is None or disk.parameters is None:
        return {}
    size = preflight.size_text
    weights = disk.parameters * DTYPE_BYTES[plan.config.model.dtype]
    words = {
        "learner": f"{size(disk.checkpoint + weights)} over all ranks: weights and optimiser state, as in a "
        "checkpoint, and gradients; activations come on top",
    }
    if plan.needs_reference:
        words["reference model"] = f"{size(weights)} of weights"
    if plan.needs_engine:
        words["each engine"] = f"{size(weights)} of weights, and its KV cache"
    return words
