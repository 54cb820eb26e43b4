"""A plugin of rlsdk in one file."""

from __future__ import annotations

import rlsdk
from rlsdk.limits import Count


@rlsdk.reward("my_reward")
def my_reward(rollout: rlsdk.Rollout, *, limit: Count = 60) -> float:
    """Reward short answers: 1 for an empty one, falling in a line to 0 at `limit` characters.

    Args:
        rollout: The rollout to score; `rollout.text` is its last answer, `rollout.task.answer` the right one.
        limit: Characters from which the reward is 0.
    """
    return max(0.0, 1.0 - len(rollout.text) / limit)
