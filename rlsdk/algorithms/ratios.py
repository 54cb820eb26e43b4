"""Inputs of policy losses and corrections, with the untrained tokens set to zero.

Zeroed *before* anything is computed: a NaN at an untrained token would otherwise come back in the gradient, as 0 · NaN,
however well the loss is masked afterwards.
"""

from __future__ import annotations

from typing import Annotated

import torch
from torch import Tensor

from rlsdk.batch import LossInputs, wide
from rlsdk.limits import at_least

DualClip = Annotated[float, at_least(1)]
"""A bound of ratios for negative advantages; below 1 it would cut the loss of unchanged tokens."""
Metrics = dict[str, Tensor]
"""Name -> detached scalar, a mean over the trained tokens."""


def trained(x: LossInputs, values_t: Tensor) -> Tensor:
    """`values_t` in at least float32, zero where a token is not trained on."""
    return torch.where(x.loss_mask, wide(values_t), 0)


def log_ratio(x: LossInputs, to: Tensor | None = None) -> Tensor:
    """`log π - log π_old` per token, or to other logprobs `[t]`, with the gradient of π alone; not clamped."""
    base = x.old_logprobs if to is None else to
    return trained(x, wide(x.logprobs) - wide(base).detach())


def credit(x: LossInputs) -> Tensor:
    """The advantages `[t]` as constants, zero where a token is not trained on."""
    return trained(x, x.advantages.detach())


def clipped_surrogate(advantages: Tensor, ratio: Tensor, low: float, high: float) -> Tensor:
    """PPO's loss: `max(-A·r, -A·clip(r, 1 - low, 1 + high))` (arXiv:1707.06347, eq. 7)."""
    return torch.maximum(-advantages * ratio, -advantages * ratio.clamp(1 - low, 1 + high))


def dual_clipped(loss: Tensor, advantages: Tensor, bound: float | None) -> Tensor:
    """`loss` with at most `bound` as the ratio that a token with negative advantage is charged for (arXiv:1912.09729).

    PPO's clip leaves that side open: without a bound, one token that became far likelier outweighs the batch.
    """
    return loss if bound is None else torch.where(advantages < 0, torch.minimum(loss, -advantages * bound), loss)


def share_clipped(x: LossInputs, ratio: Tensor, low: float, high: float) -> Tensor:
    """Share of the trained tokens whose gradient the clip takes away."""
    ratio, advantages = ratio.detach(), credit(x)
    outside = ((ratio > 1 + high) & (advantages > 0)) | ((ratio < 1 - low) & (advantages < 0))
    return outside.sum() / x.loss_mask.sum().clamp(min=1)
