"""Corrections that look at the policy being trained: off_policy_mask, rejection."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

import rlsdk
from rlsdk.kit import Metrics, at_level, bounded, credit, in_order, log_ratio, masked_mean
from rlsdk.limits import NonNegative, Positive


@rlsdk.correction("off_policy_mask", masks=True, compares="policy")
def off_policy_mask(x: rlsdk.LossInputs, *, threshold: Positive = 0.5) -> tuple[Tensor, Metrics]:
    """Mask bad rollouts that have become much less likely than when they were sampled; the others weigh 1.

    Mistakes that the policy no longer makes teach little and destabilise training. The divergence from the sampler
    includes older weights as well as rounding of the engine, and grows with each update on a batch.
    Paper: off-policy sequence masking, DeepSeek-V3.2, arXiv:2512.02556, which gives no threshold; it is TRL's advice.
    Formula: 0 where `A < 0` and `mean_t(log μ - log π) > threshold` over the rollout's tokens, else 1; `π` is the
    policy being trained, `μ` the one that sampled.
    When to use: several updates per batch, or samples of older policies.

    Args:
        x: The batch.
        threshold: Maximum mean divergence per token of a bad rollout, in nats.
    """
    divergence = -x.sequence_mean(log_ratio(x, x.behaviour_logprobs).detach())
    masked = (credit(x) < 0) & (divergence > threshold)
    return torch.where(masked, torch.zeros_like(divergence), 1), {"cut": masked_mean(masked.float(), x.loss_mask)}


@rlsdk.correction("rejection", masks=True, compares="policy", check=in_order("low", "high"))
def rejection(
    x: rlsdk.LossInputs,
    *,
    measure: Literal["ratio", "k2", "k3"] = "k3",
    level: Literal["token", "mean", "sum", "max"] = "mean",
    low: NonNegative = 0.0,
    high: Positive = 0.01,
) -> tuple[Tensor, Metrics]:
    """Mask tokens or rollouts that the policy being trained would hardly have sampled; the others weigh 1.

    The core's `token_mask`, `sequence_mask`, `geometric` and `divergence_mask` compare the policy before the update
    with the sampler, which takes a pass of the learner. This one compares the policy in each optimiser step, so it also
    works with `old_logprobs: rollout`.
    Source: the rejection sampling of verl's rollout correction in bypass mode (`rollout_rs` with `bypass_mode`).
    Formula: 1 where `low ≤ d ≤ high`, else 0: with `ρ = π / μ`, `d` is `ρ` (ratio), `½ · log² ρ` (k2) or
    `ρ - 1 - log ρ` (k3) of the token, or the mean, sum or maximum over the rollout; the mean and sum of `ratio` are
    those of `log ρ`. `π` is the policy being trained, `μ` the one that sampled.
    When to use: the engine's logprobs in place of the learner's, with several updates per batch or stale samples.

    Args:
        x: The batch.
        measure: Ratio of the probabilities, or an estimate of the divergence.
        level: Value of each token, or the mean, sum or maximum over its rollout.
        low: Minimum; 0 for none.
        high: Maximum.
    """
    difference = bounded(log_ratio(x, x.behaviour_logprobs).detach())
    estimates = {
        "ratio": difference,
        "k2": difference.square() / 2,
        "k3": torch.expm1(difference) - difference,
    }
    value = at_level(x, estimates[measure], level)
    value = bounded(value).exp() if measure == "ratio" else value
    kept = (value >= low) & (value <= high)
    return kept.to(difference.dtype), {"cut": masked_mean((~kept).float(), x.loss_mask)}
