"""Labels of rollouts for preference losses and imitation losses."""

from __future__ import annotations

import numpy as np

from rlsdk.contracts.tasks import label_of
from rlsdk.errors import RunError
from rlsdk.plurals import counted
from rlsdk.rollout.step_batch import StepBatch


def labels(
    batch: StepBatch, needs: frozenset[str], *, passing: float = 1.0, rewarded: bool = True
) -> dict[str, np.ndarray]:
    """Return the labels in `needs` that preference losses and imitation losses read, `[n]` each.

    `pairs` is the group; `expert` is True for an expert's answer. If a loss reads `pairs`, `preferred` is True for the
    better one of each pair. Otherwise it is True for each right answer.

    Args:
        batch: Rollouts of a step.
        needs: Fields that the components declared.
        passing: Minimum reward of a right answer.
        rewarded: True if the run has a reward.

    Raises:
        RunError: A group is not a pair, or its two rewards are equal.
        DataError: A demonstration has no label that says whether it is right.
    """
    found: dict[str, np.ndarray] = {}
    if "pairs" in needs:
        found = {"pairs": batch.groups, "preferred": _better(batch)}
    elif "preferred" in needs:
        found["preferred"] = _right(batch, passing, rewarded)
    if "expert" in needs:
        found["expert"] = np.arange(len(batch.rollouts)) >= batch.sampled
    return {name: values for name, values in found.items() if name in needs}


def _better(batch: StepBatch) -> np.ndarray:
    """Bool `[n]`: True for the rollout with the greater reward in each pair."""
    rewards, size = np.array([s.value for s in batch.scores]), np.bincount(batch.groups)
    least = np.full(len(size), np.inf)
    np.minimum.at(least, batch.groups, rewards)
    better: np.ndarray = rewards > least[batch.groups]  # not above the mean, which may round up to the greater one
    count = np.bincount(batch.groups, better)
    if wrong := np.flatnonzero((size != 2) | (count != 1)).tolist():
        at = next(i for i, group in enumerate(batch.groups) if group == wrong[0])
        raise RunError(
            f"the policy loss learns from pairs of a better and a worse rollout, but task "
            f"{batch.rollouts[at].task.id!r} has {counted(size[wrong[0]].item(), 'rollout')}, {count[wrong[0]]:g} of "
            "them better; add the filter 'best_worst'"
        )
    return better


def _right(batch: StepBatch, passing: float, rewarded: bool) -> np.ndarray:
    """Bool `[n]`: True for a right rollout, judged by its reward or, for a demonstration, by its task's label."""
    right = np.array([score.value >= passing for score in batch.scores])
    for i, rollout in enumerate(batch.rollouts):
        if (rollout.policy_versions[rollout.loss_mask] >= 0).any():
            continue  # sampled: the task's label does not apply to this answer
        labelled = isinstance(rollout.task.metadata.get("label"), bool)
        if labelled or i >= batch.sampled or not rewarded:
            right[i] = label_of(rollout.task)
    return right
