"""Policy losses that restrain the tokens that make entropy collapse: those with the highest covariance.

A token's covariance is `(A - mean A) · (log π - mean log π)`, with means over the trained tokens of the whole optimiser
batch. Both losses read `x.whole`, so that micro-batches choose the same tokens as the whole batch would.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rlsdk.algorithms.packed import masked_mean
from rlsdk.algorithms.ratios import Metrics, clipped_surrogate, credit, in_order, log_ratio, trained
from rlsdk.batch import LossInputs
from rlsdk.batch.arithmetic import bounded
from rlsdk.limits import NonNegative, Share
from rlsdk.marks import policy_loss


@policy_loss("clip_cov", whole_batch=True, check=in_order("cov_low", "cov_high"))
def clip_cov(
    x: LossInputs,
    *,
    ratio: Share = 2e-4,
    cov_low: float = 1.0,
    cov_high: float = 5.0,
    clip_low: NonNegative = 0.2,
    clip_high: NonNegative = 0.2,
) -> tuple[Tensor, Metrics]:
    """PPO's clip, with no gradient for a few random tokens of high covariance.

    Paper: Clip-Cov, arXiv:2505.22617; tokens already clipped by PPO are not drawn.
    Formula: PPO's loss, zero for `max(1, ratio · tokens)` tokens drawn from those with covariance in
    `cov_low…cov_high`.
    When to use: the entropy collapses, and the reward stops improving.

    Args:
        x: The batch.
        ratio: Share of trained tokens to draw.
        cov_low: Exclusive lower bound of the covariance of tokens to draw.
        cov_high: Exclusive upper bound of the covariance of tokens to draw.
        clip_low: How far PPO's ratio may fall below 1.
        clip_high: How far it may rise above 1.
    """
    loss = _surrogate(x, clip_low, clip_high)
    whole = x.whole
    silent = _surrogate(whole, clip_low, clip_high) > _unclipped(whole)
    covariance = _covariance(whole)
    candidates = whole.loss_mask & ~silent & (covariance > cov_low) & (covariance < cov_high)
    places = candidates.nonzero()[:, 0]
    order = torch.randperm(len(places), generator=x.generator, device=x.generator.device).to(places.device)
    cut = torch.zeros_like(candidates).index_fill(0, places[order[: _count(whole, ratio)]], True)
    drawn = _part(x, cut)
    return torch.where(drawn, 0, loss), {"cut": masked_mean(drawn.float(), x.loss_mask)}


@policy_loss("kl_cov", whole_batch=True)
def kl_cov(x: LossInputs, *, ratio: Share = 2e-4, kl_coef: NonNegative = 1.0) -> tuple[Tensor, Metrics]:
    """The unclipped surrogate, with a KL penalty on the few tokens of highest covariance.

    Paper: KL-Cov, arXiv:2505.22617.
    Formula: `-A·r`, plus `kl_coef · |log π - log π_old|` for the `max(1, ratio · tokens)` tokens of highest covariance.
    When to use: as `clip_cov`, if those tokens should be restrained rather than cut off. Use one update per batch:
    neither the paper nor this loss bounds the ratio, and over several updates one token may dominate the batch.

    Args:
        x: The batch.
        ratio: Share of trained tokens to penalise.
        kl_coef: Weight of the penalty.
    """
    whole = x.whole
    covariance = torch.where(whole.loss_mask, _covariance(whole), -torch.inf)
    count = min(_count(whole, ratio), int(whole.loss_mask.sum()))
    greatest = torch.zeros_like(whole.loss_mask).index_fill(0, covariance.topk(count).indices, True)
    chosen = _part(x, greatest)
    loss = _unclipped(x) + torch.where(chosen, kl_coef * log_ratio(x).abs(), 0)
    return loss, {"penalised": masked_mean(chosen.float(), x.loss_mask)}


def _unclipped(x: LossInputs) -> Tensor:
    return -credit(x) * bounded(log_ratio(x)).exp()


def _surrogate(x: LossInputs, low: float, high: float) -> Tensor:
    return clipped_surrogate(credit(x), bounded(log_ratio(x)).exp(), low, high)


def _covariance(x: LossInputs) -> Tensor:
    advantages, log_prob = credit(x), trained(x, x.logprobs)
    return (advantages - masked_mean(advantages, x.loss_mask)) * (log_prob - masked_mean(log_prob, x.loss_mask))


def _count(x: LossInputs, ratio: float) -> int:
    return max(int(ratio * int(x.loss_mask.sum())), 1)


def _part(x: LossInputs, chosen: Tensor) -> Tensor:
    """Return the part of `chosen`, over the whole batch, that belongs to `x`."""
    return chosen[x.offset : x.offset + len(x.loss_mask)]
