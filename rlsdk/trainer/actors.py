"""Start engines and learner side by side, and end them."""

from __future__ import annotations

import os
from typing import Any

import attrs

from rlsdk.cluster.actors import kill
from rlsdk.cluster.placement import Layout, layout
from rlsdk.config import Plan
from rlsdk.engines.starting import exchanged_adapter, start_engines, started_engines
from rlsdk.isolation.watching import stage
from rlsdk.learners.group import LearnerGroup
from rlsdk.learners.starting import start_learner


@attrs.define
class Actors:
    """The actors of a run."""

    engines: list[Any]
    learner: LearnerGroup
    layout: Layout

    def stop(self) -> None:
        """End the learner and all engines."""
        self.learner.stop()
        for engine in self.engines:
            kill(engine)


def start_actors(plan: Plan, gpus: int, steps: int) -> Actors:
    """Start engines and learner side by side and wait until all are ready."""
    found = layout(plan.config.placement, os.cpu_count() or 1, gpus)
    adapter = exchanged_adapter(plan)
    with stage("the start"):
        starting = start_engines(plan, found, adapter) if plan.needs_engine else []
        learner = start_learner(plan, found, adapter, steps)
        return Actors(started_engines(plan, starting), learner, found)
