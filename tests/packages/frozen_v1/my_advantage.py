"""A plugin of rlsdk in one file."""

from __future__ import annotations

import rlsdk
from torch import Tensor


@rlsdk.advantage("my_advantage")
def my_advantage(x: rlsdk.CreditInputs, *, scale: float = 1.0) -> Tensor:
    """Reward minus the mean reward of the group.

    A group of one, or of equal rewards, has advantage zero.
    Formula: `A = scale · (r - μ)`.

    Args:
        x: The batch: rewards float `[n]`, groups int64 `[n]`.
        scale: Factor on all advantages.

    Returns:
        float `[n]`, one for each rollout.
    """
    return scale * (x.outcomes - x.group_mean(x.outcomes))
