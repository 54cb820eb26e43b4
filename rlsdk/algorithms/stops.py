"""Stop rules: whether the groups sampled so far are enough to train on, or the step waits for more."""

from __future__ import annotations

import math

from rlsdk.marks import stop


@stop("all")
def all_there(*, available: int, target: int) -> bool:
    """Wait for the whole batch.

    Source: the usual batch.
    Formula: `available ≥ target`.
    When to use: always, unless a step waits long for its last groups.

    Args:
        available: Groups that are there.
        target: Groups of a batch.
    """
    return available >= target


@stop("enough")
def enough(*, available: int, target: int, share: float = 0.8) -> bool:
    """Continue with a part of the batch; the groups that come later belong to the next batches.

    Batches are smaller by what is missing, and the tasks that still run are not started again for it: over many steps
    as many groups are trained as are made. One group is the least.
    Source: Trinity-RFT (`over_rollout.ratio`, of which this is the complement).
    Formula: `available ≥ max(1, ceil(share · target))`.
    When to use: lengths with a long tail, where the last groups of a batch keep everybody waiting.

    Args:
        available: Groups that are there.
        target: Groups of a batch.
        share: Share of the batch that is enough; 1 or more for all of it.
    """
    return available >= min(target, max(1, math.ceil(share * target)))
