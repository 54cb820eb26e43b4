"""Inputs of policy losses and corrections, with untrained tokens set to zero.

They are zeroed *before* anything is computed: otherwise a NaN at an untrained token would reach the gradient, as 0 ·
NaN, even if the loss is masked afterwards.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Annotated, Any

import torch
from torch import Tensor

from rlsdk.batch import LossInputs, wide
from rlsdk.contracts import RunFacts
from rlsdk.limits import at_least

DualClip = Annotated[float, at_least(1)]
"""Bound of ratios for negative advantages; below 1 it would clip the loss of unchanged tokens."""
Metrics = dict[str, Tensor]
"""Name -> detached scalar, a mean over the trained tokens, or one value per rollout or pair."""


def trained(x: LossInputs, values_t: Tensor) -> Tensor:
    """Return `values_t` in at least float32, zero where a token is not trained on."""
    return torch.where(x.loss_mask, wide(values_t), 0)


def log_ratio(x: LossInputs, to: Tensor | None = None) -> Tensor:
    """Return `log π - log π_old`, or to other logprobs `[t]`, with the gradient of π only; not clamped."""
    base = x.old_logprobs if to is None else to
    return trained(x, wide(x.logprobs) - wide(base).detach())


def credit(x: LossInputs) -> Tensor:
    """Return the advantages `[t]` as constants, zero where a token is not trained on."""
    return trained(x, x.advantages.detach())


def clipped_surrogate(advantages: Tensor, ratio: Tensor, low: float, high: float) -> Tensor:
    """Compute PPO's loss, `max(-A·r, -A·clip(r, 1 - low, 1 + high))` (arXiv:1707.06347, eq. 7)."""
    return torch.maximum(-advantages * ratio, -advantages * ratio.clamp(1 - low, 1 + high))


def dual_clipped(loss: Tensor, advantages: Tensor, bound: float | None) -> Tensor:
    """Cap the ratio in the loss of tokens with negative advantage at `bound` (arXiv:1912.09729).

    PPO's clip leaves that side open: without a bound, one token that became far likelier dominates the batch.
    """
    return loss if bound is None else torch.where(advantages < 0, torch.minimum(loss, -advantages * bound), loss)


def share_clipped(x: LossInputs, ratio: Tensor, low: float, high: float) -> Tensor:
    """Return the share of trained tokens whose gradient is removed by the clip."""
    ratio, advantages = ratio.detach(), credit(x)
    outside = ((ratio > 1 + high) & (advantages > 0)) | ((ratio < 1 - low) & (advantages < 0))
    return outside.sum() / x.loss_mask.sum().clamp(min=1)


def in_order(low: str, high: str) -> Callable[[RunFacts, Mapping[str, Any]], Iterator[tuple[str, str]]]:
    """Return a check that refuses empty ranges.

    Args:
        low: Name of the option for the lower end.
        high: Name of the option for the upper end.
    """

    def check(run: RunFacts, options: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
        if options[low] > options[high]:
            yield low, f"{options[low]:g} is above {high}={options[high]:g}: no number is within these bounds"

    return check
