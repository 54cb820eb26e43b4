"""What policy losses and corrections start from: their inputs with the untrained tokens set to zero.

Zeroed *before* anything is computed: a NaN at an untrained token would otherwise come back in the gradient, as 0 · NaN,
however well the loss is masked afterwards.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rlsdk.batch import LossInputs, wide

LOG_RATIO_BOUND = 20.0
Metrics = dict[str, Tensor]
"""Name -> detached scalar, a mean over the trained tokens."""


def trained(x: LossInputs, values_t: Tensor) -> Tensor:
    """`values_t` in at least float32, zero where a token is not trained on."""
    return torch.where(x.loss_mask, wide(values_t), 0)


def bounded(log_ratio: Tensor) -> Tensor:
    """A log-ratio within ±20, so that its exponential is a number in float32."""
    return log_ratio.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)


def log_ratio(x: LossInputs) -> Tensor:
    """`log π - log π_old` per token, with the gradient of π; not clamped."""
    return trained(x, wide(x.logprobs) - wide(x.old_logprobs))


def clipped_surrogate(advantages: Tensor, ratio: Tensor, low: float, high: float) -> Tensor:
    """PPO's loss: `max(-A·r, -A·clip(r, 1 - low, 1 + high))` (arXiv:1707.06347, eq. 7)."""
    return torch.maximum(-advantages * ratio, -advantages * ratio.clamp(1 - low, 1 + high))


def share_clipped(x: LossInputs, ratio: Tensor, low: float, high: float) -> Tensor:
    """Share of the trained tokens whose gradient the clip takes away."""
    ratio, advantages = ratio.detach(), trained(x, x.advantages)
    outside = ((ratio > 1 + high) & (advantages > 0)) | ((ratio < 1 - low) & (advantages < 0))
    return outside.sum() / x.loss_mask.sum().clamp(min=1)
