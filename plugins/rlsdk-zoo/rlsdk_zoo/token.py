"""Policy losses that judge each token by itself: sppo, rec, dppo.

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
    """PPO on the log-ratio: gradients weigh by the advantage alone, and end where the policy went too far either way.

    Not Self-Play Preference Optimization, which has the same letters. Where the clip binds, Trinity-RFT gives the loss
    the value 0; here it has the formula's, with the same gradient, none.
    Paper: softmax PPO (sPPO), arXiv:2108.05828; ε is Trinity-RFT's.
    Formula: `-A · log clip(r, 1 / (1 + ε), 1 + ε)`.
    When to use: a few updates on one batch, where rare tokens, whose ratios move fast, should weigh no more than
    others.

    Args:
        x: The batch.
        clip: ε; the ratio counts between `1 / (1 + ε)` and `1 + ε`.
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
    """REINFORCE with clipping: what is left of GRPO without its importance weights, and as good off-policy.

    One class of the paper's methods; of the others AsymRE is the advantage `asymre`, RED-Drop the option `drop` of the
    advantage `rec`, and OPMD the loss `zoo/kimi`. Trinity-RFT's `rec` bundles them as options.
    Paper: REC, arXiv:2509.24203; bounds are the paper's, `ring` those of its REC-Ring.
    Formula: `-M · A · log π`, with `importance_sampling` `-M · sg[r] · A · log π`. `M` is 1 on tokens that are kept,
    else 0. `one_side` keeps `r ≤ 1 + clip_high` where `A > 0` and `r ≥ 1 - clip_low` where `A < 0`; `two_side` keeps `1
    - clip_low ≤ r ≤ 1 + clip_high`; `ring` keeps these, `r ≤ 1 - ring_low` where `A > 0` and `r ≥ 1 + ring_high` where
    `A < 0`.
    When to use: samples of older policies, or of no policy at all. Wider bounds (0.6 and 2.0) learn faster, and hold
    longer than one would think.

    Args:
        x: The batch.
        clip: Rule for the tokens that are kept, by their ratio.
        importance_sampling: Weigh each token by its ratio; the paper finds that it changes little.
        clip_low: How far the ratio may fall below 1.
        clip_high: How far it may rise above 1.
        ring_low: From so far below 1, good tokens are kept again.
        ring_high: From so far above 1, bad tokens are kept again.
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

    Ratio and divergence are against the policy that sampled: against a recomputed one training collapses (§5.2). verl
    truncates the ratio at 20, prime-rl adds a KL term; the objective, followed here, has neither.
    Paper: DPPO, arXiv:2602.04879, eq. 12, with the divergence of two outcomes, this token or another, eq. 13 and 14.
    Formula: `-M · ρ · A` with `ρ = π / μ`; `M` is 0 where the divergence `D` is above the threshold and the update
    leads further away (`A > 0` and `ρ > 1`, or `A < 0` and `ρ < 1`), else 1. `tv`: `D = |μ - π|`; `kl`: `D = μ·log(μ /
    π) + (1 - μ)·log((1 - μ) / (1 - π))`.
    When to use: in place of PPO's clip, above all where sampler and trainer disagree: mixtures of experts, low
    precision.

    Args:
        x: The batch.
        divergence: Total variation, or KL.
        threshold: Divergence beyond which a token learns no further; null for the paper's, 0.15 for tv and 0.05 for kl.
    """
    difference, advantages = log_ratio(x, x.behaviour_logprobs), credit(x)
    policy, sampler = _log_probability(x, x.logprobs), _log_probability(x, x.behaviour_logprobs)
    distance = _total_variation(sampler, policy) if divergence == "tv" else _binary_kl(sampler, policy)
    further = ((advantages > 0) & (difference > 0)) | ((advantages < 0) & (difference < 0))
    beyond = distance > (DIVERGENCE_THRESHOLD[divergence] if threshold is None else threshold)
    loss = torch.where(further & beyond, 0, -advantages * bounded(difference).exp())
    return loss, {
        "clip_share": masked_mean((further & beyond).float(), x.loss_mask),
        "divergence": masked_mean(distance, x.loss_mask),
    }


def _log_probability(x: rlsdk.LossInputs, logprobs: Tensor) -> Tensor:
    """Detached; at most 0, which rounding, and inputs made by hand, may exceed."""
    return trained(x, wide(logprobs).detach()).clamp(max=0)


def _total_variation(sampler: Tensor, policy: Tensor) -> Tensor:
    return (sampler.exp() - policy.exp()).abs()


def _binary_kl(sampler: Tensor, policy: Tensor) -> Tensor:
    """KL(sampler ‖ policy) of this token against all others; large, not infinite, where the policy alone is certain."""
    others, others_now = -torch.expm1(sampler), -torch.expm1(policy)
    least = torch.finfo(policy.dtype).tiny
    change = torch.xlogy(others, others) - torch.xlogy(others, others_now.clamp(least))
    return sampler.exp() * (sampler - policy) + change
