"""Reward from the workflow or environment that produced the rollout."""

from __future__ import annotations

import rlsdk
from rlsdk.types import Rollout, Score


@rlsdk.reward("environment", runs="driver", reads_given=True)
def environment(rollout: Rollout) -> Score:
    """Sum of the rewards given by workflow or environment, each on the token that earned it.

    It is the default if the workflow gives rewards and no reward is named. The metrics are the rollout's; `success`, if
    present, also becomes `correct`. A rollout without a reward is invalid.
    """
    if not rollout.rewards:
        return Score.invalid(f"neither workflow nor environment gave a reward ({rollout.status})")
    correct = {"correct": rollout.metrics["success"]} if "success" in rollout.metrics else {}
    total = sum(value for _, value in rollout.rewards)
    return Score(total, metrics={**correct, **rollout.metrics}, token_rewards=rollout.rewards)
