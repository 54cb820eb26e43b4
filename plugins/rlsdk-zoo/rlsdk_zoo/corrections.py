"""Corrections that look at the policy being trained: off_policy_mask."""

from __future__ import annotations

import torch
from torch import Tensor

import rlsdk
from rlsdk.kit import Metrics, credit, log_ratio, masked_mean
from rlsdk.limits import Positive


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
