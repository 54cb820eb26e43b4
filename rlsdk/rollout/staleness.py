"""How old the weights are that sampled a group."""

from __future__ import annotations

import attrs
import numpy as np

from rlsdk.types import Group, Rollout


def staleness(group: Group, step: int) -> int:
    """Trainer steps between the oldest weights in a group and the step that would train on it; 0 without tokens.

    Args:
        group: The group.
        step: Steps that are done.
    """
    version = group.oldest_version
    return 0 if version is None else step - version


def expires_at(max_staleness: int, sync_interval: int) -> int:
    """The least staleness of a group that is never trained.

    Args:
        max_staleness: Syncs that a group may lie behind.
        sync_interval: Steps between two syncs.
    """
    return (max_staleness + 1) * sync_interval


def masked(rollout: Rollout, step: int, most: int) -> np.ndarray:
    """The tokens of a rollout that are young enough to be trained on, bool `[T]`.

    Args:
        rollout: The rollout.
        step: Steps that are done.
        most: Greatest staleness of a token.
    """
    unsampled = rollout.policy_versions < 0  # demonstrations do not grow old
    young: np.ndarray = rollout.loss_mask & (unsampled | (step - rollout.policy_versions <= most))
    return young


def without_old(group: Group, step: int, most: int | None) -> Group:
    """The group with its old tokens left out of the loss; itself if none is old.

    Args:
        group: The group.
        step: Steps that are done.
        most: Greatest staleness of a token; None: any.
    """
    if most is None or staleness(group, step) <= most:
        return group
    young = [attrs.evolve(r, loss_mask=masked(r, step, most)) for r in group.rollouts]
    return attrs.evolve(group, rollouts=young)


def is_trainable(group: Group) -> bool:
    """Whether a token of it counts in a loss."""
    return any(rollout.loss_mask.any() for rollout in group.rollouts)
