"""A plugin of rlsdk in one file."""

from __future__ import annotations

import rlsdk
from rlsdk.limits import NonNegative


@rlsdk.filter("my_filter")
def my_filter(group: rlsdk.Group, *, spread: NonNegative = 0.0) -> bool:
    """Train on a group if its best and worst reward differ.

    Args:
        group: Rollouts of one task, with their scores.
        spread: The difference must be greater.
    """
    values = [score.value for score in group.scores if score.valid]
    return len(values) > 1 and max(values) - min(values) > spread
