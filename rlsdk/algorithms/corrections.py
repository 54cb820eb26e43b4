"""Corrections: detached weights for the mismatch between sampler and trainer.

`ρ = π_old / μ` is the ratio of a sampled token's probability in the trainer, before the update, to that in the engine
that sampled it; `ρ(y)` is the ratio of a whole rollout, the product over its tokens. All bounds apply to the ratio
itself. A weight of 0 removes a token from the sum, never from the denominator. A list of corrections multiplies their
weights; each is computed from the same logprobs, and from all trained tokens of a rollout, also those that another one
masks. Metrics: `kl` and `k3` estimate KL(μ ‖ π_old), `chi2` is `mean ρ² - 1`, `cut` is the share of trained tokens
whose weight is zero or was truncated.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from rlsdk.algorithms.packed import Level, at_level, in_order, masked_mean, trained
from rlsdk.batch import LossInputs, wide
from rlsdk.batch.arithmetic import bounded
from rlsdk.limits import NonNegative, Positive
from rlsdk.marks import correction

RatioLevel = Literal["token", "sequence", "geometric"]
Weighted = tuple[Tensor, dict[str, Tensor]]


@correction("tis")
def tis(x: LossInputs, *, cap: Positive = 2.0, level: Literal["token", "sequence"] = "token") -> Weighted:
    """Truncated importance sampling: the default, for engines that round slightly differently.

    Source: "Your efficient RL framework secretly brings you off-policy RL training" (Yao et al., 2025); truncation:
    IMPALA, arXiv:1802.01561.
    Formula: `min(ρ, cap)`, per token or per rollout.
    When to use: an engine that rounds slightly differently from the trainer, as nearly all do.

    Args:
        x: The batch.
        cap: Maximum weight.
        level: Ratio per token, or per rollout (`sequence`).
    """
    ratio = _ratio(x, level)
    return ratio.clamp(max=cap), _metrics(x, ratio > cap)


@correction("mis", check=in_order("low", "high"))
def mis(
    x: LossInputs, *, low: NonNegative = 0.5, high: Positive = 2.0, level: Literal["token", "sequence"] = "sequence"
) -> Weighted:
    """Masked importance sampling: ratios outside the bounds are discarded.

    Source: "When speed kills stability" (Liu et al., 2025); bounds of verl's seq-MIS.
    Formula: `ρ` where `low ≤ ρ ≤ high`, else 0; per token or per rollout.
    When to use: engine and trainer that occasionally disagree strongly: other kernels, a quantised engine.

    Args:
        x: The batch.
        low: Minimum trusted ratio.
        high: Maximum trusted ratio.
        level: Ratio per token, or per rollout (`sequence`).
    """
    ratio = _ratio(x, level)
    kept = _within(ratio, low, high)
    return torch.where(kept, ratio, 0), _metrics(x, ~kept)


@correction("icepop", check=in_order("low", "high"))
def icepop(x: LossInputs, *, low: NonNegative = 0.5, high: Positive = 5.0) -> Weighted:
    """Token-level masked importance sampling with wide bounds: for mixture-of-experts models.

    Paper: IcePop, Ring-1T, arXiv:2510.18855; bounds are the paper's.
    Formula: `ρ` where `low ≤ ρ ≤ high`, else 0.
    When to use: mixtures of experts, whose routers disagree between engine and trainer.

    Args:
        x: The batch.
        low: Minimum trusted ratio.
        high: Maximum trusted ratio.
    """
    ratio = _ratio(x, "token")
    kept = _within(ratio, low, high)
    return torch.where(kept, ratio, 0), _metrics(x, ~kept)


@correction("token_mask", masks=True, check=in_order("low", "high"))
def token_mask(x: LossInputs, *, low: NonNegative = 0.5, high: Positive = 2.0) -> Weighted:
    """Mask tokens whose ratio is out of bounds; the others weigh 1.

    Source: the token mask of verl's rollout correction, whose bounds are on the inverse ratio.
    Formula: 1 where `low ≤ ρ ≤ high`, else 0.
    When to use: few outliers, and gradients that should not be reweighted.

    Args:
        x: The batch.
        low: Minimum trusted ratio.
        high: Maximum trusted ratio.
    """
    return _mask(x, "token", low, high)


@correction("sequence_mask", masks=True, check=in_order("low", "high"))
def sequence_mask(x: LossInputs, *, low: NonNegative = 0.5, high: Positive = 2.0) -> Weighted:
    """Mask rollouts whose ratio is out of bounds; the others weigh 1. For long rollouts, see `geometric`.

    Source: the sequence mask of verl's rollout correction; bounds of its seq-MIS.
    Formula: 1 where `low ≤ ρ(y) ≤ high`, else 0.
    When to use: short answers, where a single mismatched token makes the whole rollout suspect.

    Args:
        x: The batch.
        low: Minimum trusted ratio.
        high: Maximum trusted ratio.
    """
    return _mask(x, "sequence", low, high)


@correction("geometric", masks=True, check=in_order("low", "high"))
def geometric(x: LossInputs, *, low: NonNegative = 0.999, high: Positive = 1.001) -> Weighted:
    """Mask rollouts whose *mean* mismatch is out of bounds: independent of length.

    Source: "When speed kills stability, part 3" (Li et al., 2025); bounds of verl's Geo-RS.
    Formula: 1 where `low ≤ ρ(y)^(1/tokens) ≤ high`, else 0.
    When to use: long answers, whose product of ratios is always far from 1.

    Args:
        x: The batch.
        low: Minimum trusted geometric mean.
        high: Maximum trusted geometric mean.
    """
    return _mask(x, "geometric", low, high)


@correction("divergence_mask", masks=True)
def divergence_mask(
    x: LossInputs,
    *,
    estimator: Literal["k2", "k3"] = "k3",
    level: Level = "mean",
    threshold: Positive = 0.01,
) -> Weighted:
    """Mask tokens or rollouts whose estimated divergence from the sampler is too large; the others weigh 1.

    Unlike bounds on a ratio, an estimate is never negative: deviations in both directions add up instead of cancelling.

    Source: the rejection sampling of verl's rollout correction (`rollout_rs`, k2 and k3), whose default is 0.01 for the
    mean of k3.
    Formula: 1 where `d ≤ threshold`, else 0: `d` is `ρ - 1 - log ρ` (k3) or `½ · log² ρ` (k2) of the token, or the
    mean, sum or maximum over the tokens of the rollout.
    When to use: long answers with mismatches in both directions; `max` if a single mismatched token makes the whole
    rollout suspect.

    Args:
        x: The batch.
        estimator: Estimator of the divergence of a token.
        level: Divergence of each token, or its mean, sum or maximum over the rollout.
        threshold: Maximum trusted divergence, in nats.
    """
    log_ratio = bounded(_log_ratio(x))
    divergence = torch.expm1(log_ratio) - log_ratio if estimator == "k3" else log_ratio.square() / 2
    divergence = at_level(x, divergence, level)
    kept = divergence <= threshold
    return kept.to(divergence.dtype), _metrics(x, ~kept)


@correction("routing_replay", replays_routing=True, masks=lambda options: options["cap"] is None)
def routing_replay(x: LossInputs, *, cap: Positive | None = 2.0) -> Weighted:
    """Routing replay, for mixtures of experts: the learner uses the engine's experts, then truncates ratios.

    If two experts are nearly equally likely for a token, engine and learner may choose different ones, which changes
    its logprob by much more than rounding. Here each token, prompt tokens included, carries the engine's choice, and
    the actor uses it in its passes before and during the update. The weights of the chosen experts come from the
    actor's own router, which is trained through them. Tokens with unknown experts use the actor's choice
    (`routing/unknown` is their share). The reference model always uses its own. The remaining mismatch is truncated, as
    in `tis`.

    Paper: rollout routing replay (R3), arXiv:2510.11370; as R2 and R3 in arXiv:2512.01374.
    Formula: `min(ρ, cap)` per token, with the engine's experts in both policies of `ρ`; 1 without a cap.
    When to use: mixtures of experts, with an engine that returns its choices: `transformers`.

    Args:
        x: The batch.
        cap: Maximum weight; null for weights of 1.
    """
    ratio = _ratio(x, "token")
    if cap is None:
        return torch.ones_like(ratio), _metrics(x, torch.zeros_like(ratio, dtype=torch.bool))
    return ratio.clamp(max=cap), _metrics(x, ratio > cap)


def _log_ratio(x: LossInputs) -> Tensor:
    return trained(x, wide(x.old_logprobs) - wide(x.behaviour_logprobs)).detach()


def _ratio(x: LossInputs, level: RatioLevel) -> Tensor:
    log_ratio = _log_ratio(x)
    if level == "token":
        return bounded(log_ratio).exp()
    whole = x.sequence_sum(log_ratio) if level == "sequence" else x.sequence_mean(log_ratio)
    return bounded(whole).exp()


def _within(ratio: Tensor, low: NonNegative, high: Positive) -> Tensor:
    return (ratio >= low) & (ratio <= high)


def _mask(x: LossInputs, level: RatioLevel, low: NonNegative, high: Positive) -> Weighted:
    ratio = _ratio(x, level)
    kept = _within(ratio, low, high)
    return kept.to(ratio.dtype), _metrics(x, ~kept)


def _metrics(x: LossInputs, cut: Tensor) -> dict[str, Tensor]:
    log_ratio = bounded(_log_ratio(x))
    ratio, mask = log_ratio.exp(), x.loss_mask
    return {
        "kl": masked_mean(-log_ratio, mask),
        "k3": masked_mean(torch.expm1(log_ratio) - log_ratio, mask),
        "chi2": masked_mean(ratio.square() - 1, mask),
        "cut": masked_mean(cut.to(ratio.dtype), mask),
    }
