"""Age of the weights that sampled a group."""

from __future__ import annotations

import attrs
import numpy as np

from rlsdk.types import Group, Rollout


def staleness(group: Group, step: int) -> int:
    """Return the steps between the oldest weights in a group and the step that would train on it; 0 without tokens.

    Args:
        group: The group.
        step: Number of steps done.
    """
    version = group.oldest_version
    return 0 if version is None else step - version


def expires_at(max_staleness: int, sync_interval: int) -> int:
    """Return the least staleness at which a group is never trained on.

    Args:
        max_staleness: Maximum number of syncs by which a group may lag.
        sync_interval: Steps between two syncs.
    """
    return (max_staleness + 1) * sync_interval


def masked(rollout: Rollout, step: int, most: int) -> np.ndarray:
    """Return the loss mask of a rollout without its old tokens, bool `[T]`.

    Args:
        rollout: The rollout.
        step: Number of steps done.
        most: Maximum staleness of a token.
    """
    unsampled = rollout.policy_versions < 0  # demonstrations do not grow old
    young: np.ndarray = rollout.loss_mask & (unsampled | (step - rollout.policy_versions <= most))
    return young


def without_old(group: Group, step: int, most: int | None) -> Group:
    """Return the group with its old tokens left out of the loss; the group itself if none is old.

    Args:
        group: The group.
        step: Number of steps done.
        most: Maximum staleness of a token; None for no limit.
    """
    if most is None or staleness(group, step) <= most:
        return group
    young = [attrs.evolve(r, loss_mask=masked(r, step, most)) for r in group.rollouts]
    return attrs.evolve(group, rollouts=young)


def is_trainable(group: Group) -> bool:
    """Return True if any token of a group counts in a loss."""
    return any(rollout.loss_mask.any() for rollout in group.rollouts)
