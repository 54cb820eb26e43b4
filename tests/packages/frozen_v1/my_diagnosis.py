"""A plugin of rlsdk in one file."""

from __future__ import annotations

import rlsdk
from rlsdk.contracts import Finding, History


@rlsdk.diagnosis("my_diagnosis")
def my_diagnosis(history: History, *, window: int = 5, drop: float = 0.5) -> Finding | None:
    """The reward has fallen to half of its best value.

    Args:
        history: Metrics of the run so far.
        window: Number of steps to average.
        drop: Minimum drop, as a share of the best reward.
    """
    reward = history["reward/mean"]
    if len(reward) < 2 * window:
        return None
    best, now = max(reward.values), reward.last(window).mean
    if best <= 0 or now > (1 - drop) * best:
        return None
    return Finding(f"the reward was {best:.2f} and is {now:.2f}", "look at rollouts, and lower the learning rate")
