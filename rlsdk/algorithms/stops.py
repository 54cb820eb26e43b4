"""Stop rules: whether enough groups were sampled to train on, or the step waits for more."""

from __future__ import annotations

import math

from rlsdk.marks import stop


@stop("all")
def all_there(*, available: int, target: int) -> bool:
    """Wait for the whole batch.

    Source: standard synchronous batches.
    Formula: `available ≥ target`.
    When to use: always, unless a step waits long for its last groups.

    Args:
        available: Number of available groups.
        target: Number of groups in a batch.
    """
    return available >= target


@stop("enough")
def enough(*, available: int, target: int, share: float = 0.8) -> bool:
    """Continue with part of the batch; groups that finish later go into the next batches.

    Batches shrink by the missing groups, whose tasks continue to run without being restarted: over many steps, as many
    groups are trained as are sampled. A batch has at least one group.
    Source: Trinity-RFT (the complement of its `over_rollout.ratio`).
    Formula: `available ≥ max(1, ceil(share · target))`.
    When to use: long-tailed lengths, where the last groups of a batch keep the others waiting.

    Args:
        available: Number of available groups.
        target: Number of groups in a batch.
        share: Share of the batch that is enough; 1 or more for all of it.
    """
    # Rounded, since 0.55 · 20 is a little above 11 in floating point.
    return available >= min(target, max(1, math.ceil(round(share * target, 9))))
