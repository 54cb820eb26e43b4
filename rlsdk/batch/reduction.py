"""Reduction of per-token losses to one number, with denominators of the global batch."""

from __future__ import annotations

from typing import Literal, get_args

import attrs
import torch
from torch import Tensor

from rlsdk.batch.arithmetic import size, total, wide
from rlsdk.errors import ValueFault

Aggregation = Literal["token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"]
AGGREGATIONS: tuple[str, ...] = get_args(Aggregation)


@attrs.frozen
class Totals:
    """Denominators of the global batch, with which the aggregates of its parts add up to the whole.

    Attributes:
        tokens: Number of trained tokens.
        rollouts: Number of rollouts with at least one trained token.
    """

    tokens: int
    rollouts: int

    def __add__(self, other: Totals) -> Totals:
        """Add the denominators of two batches that share no rollout."""
        return Totals(self.tokens + other.tokens, self.rollouts + other.rollouts)

    @classmethod
    def of(cls, loss_mask: Tensor, segments: Tensor) -> Totals:
        """Count trained tokens and rollouts; `loss_mask` bool `[t]`, `segments` int64 `[t]`."""
        return cls(int(loss_mask.sum()), int(torch.count_nonzero(total(loss_mask.long(), segments, size(segments)))))


def aggregate(
    loss: Tensor,
    loss_mask: Tensor,
    segments: Tensor,
    mode: Aggregation,
    *,
    norm: float | None = None,
    totals: Totals | None = None,
) -> Tensor:
    """Reduce a per-token loss to a scalar, with denominators of the global batch.

    | mode | value |
    |---|---|
    | `token-mean` | sum over tokens / tokens (DAPO, arXiv:2503.14476, eq. 8) |
    | `seq-mean-token-sum` | sum over tokens / rollouts |
    | `seq-mean-token-mean` | mean over rollouts of the mean over their tokens (GRPO, arXiv:2402.03300, eq. 3) |
    | `seq-mean-token-sum-norm` | sum over tokens / (rollouts × norm) (Dr. GRPO, arXiv:2503.20783) |

    Args:
        loss: float `[t]`, per token.
        loss_mask: bool `[t]`, True where the token counts.
        segments: int64 `[t]`, rollout of each token.
        mode: One of the four modes.
        norm: Length that `seq-mean-token-sum-norm` divides by; required for that mode.
        totals: Denominators of the global batch; default: those of this batch.

    Returns:
        A scalar; zero with a graph if nothing is trained. Rollouts without a trained token do not count.

    Raises:
        ValueFault: The mode is unknown, or its `norm` is missing.
    """
    if mode not in AGGREGATIONS:
        raise ValueFault(f"got aggregation {mode!r}; expected one of {', '.join(AGGREGATIONS)}")
    if mode == "seq-mean-token-sum-norm" and (norm is None or norm <= 0):
        raise ValueFault(f"aggregation 'seq-mean-token-sum-norm' divides by norm, a length above 0; got norm={norm}")
    totals = totals or Totals.of(loss_mask, segments)
    masked = torch.where(loss_mask, wide(loss), 0)
    if mode == "token-mean":
        return masked.sum() / max(totals.tokens, 1)
    if mode == "seq-mean-token-mean":
        counts = total(loss_mask.to(masked.dtype), segments, size(segments)).clamp(min=1)
        return (masked / counts[segments]).sum() / max(totals.rollouts, 1)
    scale = norm if mode == "seq-mean-token-sum-norm" and norm is not None else 1.0
    return masked.sum() / (max(totals.rollouts, 1) * scale)
