"""A plugin of rlsdk in one file."""

from __future__ import annotations

import rlsdk
from rlsdk.limits import Count


@rlsdk.buffer("my_buffer")
def my_buffer(group: rlsdk.Group, *, step: int, uses: int, limit: Count = 1) -> float | None:
    """Train groups of widely spread rewards first, and each at most `limit` times.

    Args:
        group: Rollouts of one task, with their scores.
        step: Training steps done.
        uses: How often the group was trained.
        limit: Most uses of a group.

    Returns:
        Priority, the greatest first; None drops the group.
    """
    if uses >= limit:
        return None
    values = [score.value for score in group.scores if score.valid]
    return max(values) - min(values) if values else 0.0
