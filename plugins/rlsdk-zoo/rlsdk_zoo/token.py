"""Policy losses that treat each token separately: sppo, rec, dppo.

`r = π / π_old` is the ratio of a token, `A` its advantage, `μ` the policy that sampled it, `sg[·]` stops the gradient.
"""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor

import rlsdk
from rlsdk.batch import wide
from rlsdk.kit import Metrics, bounded, credit, log_ratio, masked_mean, trained
from rlsdk.limits import NonNegative, Positive

DIVERGENCE_THRESHOLD = {"tv": 0.15, "kl": 0.05}
"""δ of DPPO's stability study (arXiv:2602.04879, appendix C.1)."""


@rlsdk.policy_loss("sppo")
def sppo(x: rlsdk.LossInputs, *, clip: NonNegative = 0.3) -> tuple[Tensor, Metrics]:
    """PPO on the log-ratio: the advantage alone scales gradients, which are zero once the ratio is out of bounds.

    This is not Self-Play Preference Optimization, which has the same acronym. Where the clip is active, the loss is 0
    in Trinity-RFT and has the formula's value here; the gradient is zero in both.
    Paper: softmax PPO (sPPO), arXiv:2108.05828; ε is Trinity-RFT's.
    Formula: `-A · log clip(r, 1 / (1 + ε), 1 + ε)`.
    When to use: a few updates on one batch, if rare tokens, whose ratios change fast, should have no more weight than
    others.

    Args:
        x: The batch.
        clip: ε; the ratio is clipped to `1 / (1 + ε)` and `1 + ε`.
    """
    difference, bound = log_ratio(x), math.log1p(clip)
    clipped = difference.clamp(-bound, bound)
    return -credit(x) * clipped, {"clip_share": masked_mean((clipped != difference).float(), x.loss_mask)}


@rlsdk.policy_loss("rec")
def rec(
    x: rlsdk.LossInputs,
    *,
    clip: Literal["none", "one_side", "two_side", "ring"] = "one_side",
    importance_sampling: bool = False,
    clip_low: NonNegative = 0.2,
    clip_high: NonNegative = 0.2,
    ring_low: NonNegative = 0.6,
    ring_high: NonNegative = 2.0,
) -> tuple[Tensor, Metrics]:
    """REINFORCE with clipping: GRPO without importance weights, which works as well off-policy.

    This is one class of the paper's methods. AsymRE is the advantage `asymre`, RED-Drop the option `drop` of the
    advantage `rec`, and OPMD the loss `zoo/kimi`. Trinity-RFT's `rec` bundles them as options.
    Paper: REC, arXiv:2509.24203; bounds are the paper's, for `ring` REC-Ring's.
    Formula: `-M · A · log π`, with `importance_sampling` `-M · sg[r] · A · log π`. `M` is 1 for kept tokens, else 0.
    `one_side` keeps `r ≤ 1 + clip_high` where `A > 0` and `r ≥ 1 - clip_low` where `A < 0`; `two_side` keeps `1
    - clip_low ≤ r ≤ 1 + clip_high`; `ring` keeps these, `r ≤ 1 - ring_low` where `A > 0` and `r ≥ 1 + ring_high` where
    `A < 0`.
    When to use: samples of older policies, or samples that no policy generated. Wider bounds (0.6 and 2.0) learn
    faster, and stay stable for surprisingly long.

    Args:
        x: The batch.
        clip: Rule that decides by its ratio whether a token is kept.
        importance_sampling: Weight each token by its ratio; the paper finds that it changes little.
        clip_low: How far the ratio may fall below 1.
        clip_high: How far the ratio may rise above 1.
        ring_low: Distance below 1 from which good tokens are kept again.
        ring_high: Distance above 1 from which bad tokens are kept again.
    """
    ratio, advantages = bounded(log_ratio(x)).exp().detach(), credit(x)
    good, bad = advantages > 0, advantages < 0
    above, below = ratio > 1 + clip_high, ratio < 1 - clip_low
    cut = {
        "none": torch.zeros_like(good),
        "one_side": (good & above) | (bad & below),
        "two_side": above | below,
        "ring": (above | below) & ~(good & (ratio <= 1 - ring_low)) & ~(bad & (ratio >= 1 + ring_high)),
    }[clip]
    weight = ratio if importance_sampling else torch.ones_like(ratio)
    loss = torch.where(cut, 0, -weight * advantages * trained(x, x.logprobs))
    return loss, {"clip_share": masked_mean(cut.to(ratio.dtype), x.loss_mask)}


@rlsdk.policy_loss("dppo", corrects="policy")
def dppo(
    x: rlsdk.LossInputs, *, divergence: Literal["tv", "kl"] = "tv", threshold: Positive | None = None
) -> tuple[Tensor, Metrics]:
    """A trust region by divergence: rare tokens may change by large ratios, likely ones may not lose much probability.

    Ratio and divergence are relative to the sampling policy; with recomputed logprobs, training collapses (§5.2). verl
    truncates the ratio at 20, and prime-rl adds a KL term; the paper's objective, used here, has neither.
    Paper: DPPO, arXiv:2602.04879, eq. 12, with the divergence of two outcomes, this token or another, eq. 13 and 14.
    Formula: `-M · ρ · A` with `ρ = π / μ`; `M` is 0 where the divergence `D` is above the threshold and the update
    would increase it (`A > 0` and `ρ > 1`, or `A < 0` and `ρ < 1`), else 1. `tv`: `D = |μ - π|`; `kl`: `D = μ·log(μ /
    π) + (1 - μ)·log((1 - μ) / (1 - π))`.
    When to use: instead of PPO's clip, especially if sampler and trainer disagree, as with mixtures of experts or low
    precision.

    Args:
        x: The batch.
        divergence: Total variation, or KL.
        threshold: Divergence above which a token is masked; null for the paper's, 0.15 for tv and 0.05 for kl.
    """
    difference, advantages = log_ratio(x, x.behaviour_logprobs), credit(x)
    policy, sampler = _log_probability(x, x.logprobs), _log_probability(x, x.behaviour_logprobs)
    distance = (sampler.exp() - policy.exp()).abs() if divergence == "tv" else _binary_kl(sampler, policy)
    further = ((advantages > 0) & (difference > 0)) | ((advantages < 0) & (difference < 0))
    beyond = distance > (DIVERGENCE_THRESHOLD[divergence] if threshold is None else threshold)
    loss = torch.where(further & beyond, 0, -advantages * bounded(difference).exp())
    return loss, {
        "clip_share": masked_mean((further & beyond).float(), x.loss_mask),
        "divergence": masked_mean(distance, x.loss_mask),
    }


def _log_probability(x: rlsdk.LossInputs, logprobs: Tensor) -> Tensor:
    """Return detached logprobs, clamped to 0, which rounding and handmade inputs may exceed."""
    return trained(x, wide(logprobs).detach()).clamp(max=0)


def _binary_kl(sampler: Tensor, policy: Tensor) -> Tensor:
    """Return KL(sampler ‖ policy) of this token against all others; large but finite if only the policy is certain."""
    others, others_now = -torch.expm1(sampler), -torch.expm1(policy)
    least = torch.finfo(policy.dtype).tiny
    change = torch.xlogy(others, others) - torch.xlogy(others, others_now.clamp(least))
    return sampler.exp() * (sampler - policy) + change
