"""Optimiser steps of the critic alone, in the steps before the actor is trained."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from rlsdk.learners.metrics import MetricAccumulator

if TYPE_CHECKING:
    from rlsdk.contracts.training import LearnerHandle, TrainBatch

_OF_STEPS = ("critic/loss", "critic/grad_norm", "critic/lr")
"""Metrics that are averaged over optimiser steps; the others over trained tokens."""
_SKIPPED = "critic/skipped_updates"


def train_critic(
    learner: LearnerHandle, batch: TrainBatch, minibatches: Sequence[np.ndarray], step: int
) -> dict[str, float]:
    """Take an optimiser step of the critic per minibatch, and return its metrics as `LearnerHandle.update` does.

    Args:
        learner: All ranks of the learner.
        batch: Rollouts of a training step, with `returns` and the critic's `values`.
        minibatches: Indices of the rollouts (int64) of each optimiser step.
        step: Training steps completed.
    """
    found, trained, updates = MetricAccumulator(), batch.trained_tokens, len(minibatches)
    found.add(_SKIPPED, 0.0)  # a count: steps add to the sum, not to the weight
    for i, index in enumerate(minibatches):
        learner.forward_backward(batch.select(index), role="critic", step=step, update=i, updates=updates)
        for name, value in learner.optimizer_step("critic").items():
            weight = 1.0 if name in _OF_STEPS else float(trained[index].sum())
            found.add(name, value if name == _SKIPPED else value * weight, 0.0 if name == _SKIPPED else weight)
    return found.means()
