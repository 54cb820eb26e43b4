"""Tasks and reward of a run whose client has its own: the configuration needs both, and nothing uses them."""

from __future__ import annotations

from collections.abc import Sequence

import rlsdk


@rlsdk.tasks("tasks")
def tasks() -> Sequence[rlsdk.Task]:
    """One task, whose prompt the canary reads."""
    return [rlsdk.Task(id="0", prompt="0 1 2 3")]


@rlsdk.reward("reward")
def reward(rollout: rlsdk.Rollout) -> float:
    """0.0 for every rollout."""
    return 0.0
