"""A plugin of rlsdk in one file."""

from __future__ import annotations

import math

import rlsdk
from rlsdk.limits import Share


@rlsdk.stop("my_stop")
def my_stop(*, available: int, target: int, share: Share = 0.75) -> bool:
    """Go on to training when a share of the batch is complete; the other groups go into later batches.

    Args:
        available: Groups that are complete.
        target: Groups of a whole batch.
        share: Share of the batch that is enough.
    """
    return available >= max(1, math.ceil(share * target))
