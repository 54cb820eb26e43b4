"""Start the learner of a plan on the Ray cluster."""

from __future__ import annotations

import os
from typing import Any

import attrs

from rlsdk.cluster.placement import Layout, placed_everywhere, sections_apart
from rlsdk.config import Plan
from rlsdk.contracts import ActorSpec, Adapter, ApartRole, Roles
from rlsdk.learners.apart import DividedLearnerGroup
from rlsdk.learners.group import LearnerGroup


def start_learner(plan: Plan, found: Layout, adapter: Adapter | None, steps: int) -> DividedLearnerGroup:
    """Start the learner and wait until it is ready.

    Args:
        plan: Plan of the run.
        found: Threads and resources of each actor.
        adapter: Shape of the adapter that engines receive instead of whole models; None for whole models.
        steps: Number of training steps of the run.
    """
    placement, folder = plan.config.placement, plan.folder.resolve()
    every: dict[str, Any] = {
        "loss": attrs.evolve(plan.loss, train_steps=steps),
        "total_updates": steps * plan.config.minibatches * plan.config.passes,
        "log_dir": folder / "logs",
        "cache": folder / "cache",
    }
    learner = DividedLearnerGroup.launch(
        plan.learner,
        roles(plan),
        place=ActorSpec(
            role="learner",
            world_size=placement.learners,
            threads=found.learner_threads,
            **placed_everywhere(plan, found),
        ),
        seats=found.learners,
        resources=placement.learner_resources,
        python=found.python.get("learner", ""),
        transfer=plan.weight_transfer,
        **every,
    )
    learner.adapter_only = adapter is not None
    try:
        for role, section in sections_apart(plan).items():
            learner.apart[role] = LearnerGroup.launch(
                plan.apart[role],
                roles_apart(plan)[role],
                place=ActorSpec(
                    role="learner",
                    world_size=section.ranks,
                    threads=section.threads or max(1, (os.cpu_count() or 1) // section.ranks),
                    **placed_everywhere(plan, found),
                ),
                seats=found.apart.get(role, ()),
                resources=section.resources,
                name=role,
                **every,
            )
    except BaseException:
        learner.stop()
        raise
    return learner


def roles(plan: Plan) -> Roles:
    """Return the models that run in the learner's main processes."""
    critic = plan.algorithm.critic and "critic" not in plan.apart
    reference = plan.needs_reference and "reference" not in plan.apart
    return Roles(
        actor=plan.model,
        critic=plan.critic if critic else None,
        reference=plan.reference if reference else None,
    )


def roles_apart(plan: Plan) -> dict[ApartRole, Roles]:
    """Return the models that run in separate processes."""
    held: dict[ApartRole, Roles] = {"critic": Roles(critic=plan.critic), "reference": Roles(reference=plan.reference)}
    return {role: held[role] for role in plan.apart}
