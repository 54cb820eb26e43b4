"""Start the learner of a plan on the Ray cluster."""

from __future__ import annotations

import attrs

from rlsdk.cluster.placement import Layout, placed_everywhere
from rlsdk.config import Plan
from rlsdk.contracts import ActorSpec, Adapter, Roles
from rlsdk.learners.group import LearnerGroup


def start_learner(plan: Plan, found: Layout, adapter: Adapter | None, steps: int) -> LearnerGroup:
    """Start the learner and wait until it is ready.

    Args:
        plan: Plan of the run.
        found: Threads and resources of each actor.
        adapter: Shape of the adapter that engines receive instead of whole models; None for whole models.
        steps: Number of training steps of the run.
    """
    placement, folder = plan.config.placement, plan.folder.resolve()
    learner = LearnerGroup.launch(
        plan.learner,
        roles(plan),
        attrs.evolve(plan.loss, train_steps=steps),
        ActorSpec(
            role="learner",
            world_size=placement.learners,
            threads=found.learner_threads,
            **placed_everywhere(plan, found),
        ),
        total_updates=steps * plan.config.minibatches * plan.config.passes,
        seats=found.learners,
        resources=placement.learner_resources,
        python=found.python.get("learner", ""),
        log_dir=folder / "logs",
        cache=folder / "cache",
        transfer=plan.weight_transfer,
    )
    learner.adapter_only = adapter is not None
    return learner


def roles(plan: Plan) -> Roles:
    """The models that the learner holds."""
    reference = plan.reference if plan.needs_reference else None
    return Roles(actor=plan.model, critic=plan.model if plan.algorithm.critic else None, reference=reference)
