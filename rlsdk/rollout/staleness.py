"""Age of the weights that sampled a group, and how old they may be."""

from __future__ import annotations

import attrs
import numpy as np

from rlsdk.config.rollout import RolloutSection
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


@attrs.frozen(kw_only=True)
class StalenessPolicy:
    """Limits on how far rollouts may run ahead of training.

    Attributes:
        ahead: Number of batches requested beyond that of the step of the last sync.
        interval: Steps between two syncs. Tasks that begin between them sample with the weights of the last sync, and
            count as old as those begun right after it.
        limit: Staleness from which on a group is never trained on.
        oversample: Reserve of tasks that run beside those that are needed, as a share of a batch.
        token_limit: Staleness from which on a token is left out of the loss; None for no limit.
        tail: Number of expired groups of a source that fill its next tasks: these first, then those aborted, then fresh
            ones, without a reserve. 0: expired groups are sampled again at once; -1: never.
    """

    ahead: int = 0
    interval: int = 1
    limit: int = 1
    oversample: float = 0.0
    token_limit: int | None = None
    tail: int = 0

    @classmethod
    def of(cls, section: RolloutSection) -> StalenessPolicy:
        """Return the policy that a configuration asks for."""
        limit = expires_at(section.max_staleness, section.sync_interval)
        token = section.max_token_staleness
        return cls(
            ahead=limit - 1,
            interval=section.sync_interval,
            limit=limit,
            oversample=section.oversample,
            token_limit=None if token is None else expires_at(token, section.sync_interval),
            tail=section.tail_batch,
        )

    def trimmed(self, group: Group, step: int) -> Group:
        """Return the group without the tokens that are too old to be trained on at a step."""
        return without_old(group, step, None if self.token_limit is None else self.token_limit - 1)

    def expires(self, group: Group, step: int) -> bool:
        """Return True if a group is too old to be trained on at a step."""
        young = self.trimmed(group, step)
        return staleness(young, step) >= self.limit or (is_trainable(group) and not is_trainable(young))

    def young(self, group: Group, step: int) -> Group | None:
        """Return the part of a group that may be trained on at a step; None if it is too old."""
        return None if self.expires(group, step) else self.trimmed(group, step)
