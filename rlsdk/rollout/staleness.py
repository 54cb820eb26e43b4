"""Staleness of groups and tokens, and its limits."""

from __future__ import annotations

import attrs

from rlsdk.config.rollout import RolloutSection
from rlsdk.types import Group


def staleness(group: Group, step: int) -> int:
    """Return the steps between a group's oldest weights and the step that trains on it; 0 without sampled tokens."""
    version = group.oldest_version
    return 0 if version is None else step - version


def is_trainable(group: Group) -> bool:
    """Return True if any token of a group contributes to the loss."""
    return any(rollout.loss_mask.any() for rollout in group.rollouts)


@attrs.frozen(kw_only=True)
class StalenessPolicy:
    """Limits on how far rollouts may run ahead of training.

    Attributes:
        ahead: Number of batches requested beyond the batch of the last sync's step.
        interval: Steps between two syncs. Tasks that start between syncs sample with the weights of the last sync and
            count as equally old as tasks that start right after it.
        limit: Staleness at which a group is no longer trained on.
        oversample: Extra tasks that run in addition to those needed, as a share of a batch.
        token_limit: Staleness at which a token is left out of the loss; None for no limit.
        tail: Number of expired groups of a source that trigger a tail batch: expired tasks first, then aborted, then
            new ones, without extra tasks. 0: expired groups are sampled again immediately; -1: never.
    """

    ahead: int = 0
    interval: int = 1
    limit: int = 1
    oversample: float = 0.0
    token_limit: int | None = None
    tail: int = 0

    @classmethod
    def of(cls, section: RolloutSection) -> StalenessPolicy:
        """Create the policy from a configuration."""
        # Staleness is configured in syncs. What lags behind by the allowed number expires at the next sync after that.
        limit, token = (section.max_staleness + 1) * section.sync_interval, section.max_token_staleness
        token_limit = None if token is None else (token + 1) * section.sync_interval
        return cls(
            # An answer that ends before the next sync, sampled further ahead, would have no token left to train on.
            ahead=min(limit, token_limit or limit) - 1,
            interval=section.sync_interval,
            limit=limit,
            oversample=section.oversample,
            token_limit=token_limit,
            tail=section.tail_batch,
        )

    def trimmed(self, group: Group, step: int) -> Group:
        """Return the group with the tokens that are too stale to train on at a step masked out of the loss.

        It is the group itself if there are none. Demonstrations never become stale.
        """
        limit = self.token_limit
        if limit is None or staleness(group, step) < limit:
            return group
        rollouts = []
        for rollout in group.rollouts:
            young = (rollout.policy_versions < 0) | (step - rollout.policy_versions < limit)
            rollouts.append(attrs.evolve(rollout, loss_mask=rollout.loss_mask & young))
        return attrs.evolve(group, rollouts=rollouts)

    def expires(self, group: Group, step: int) -> bool:
        """Return True if a group is too stale to train on at a step."""
        young = self.trimmed(group, step)
        return staleness(young, step) >= self.limit or (is_trainable(group) and not is_trainable(young))

    def young(self, group: Group, step: int) -> Group | None:
        """Return the part of a group that may be trained on at a step; None if the group is too stale."""
        return None if self.expires(group, step) else self.trimmed(group, step)
