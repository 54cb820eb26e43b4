"""Policy losses with a ratio per rollout instead of per token."""

from __future__ import annotations

import torch
from torch import Tensor

from rlsdk.algorithms.packed import masked_mean
from rlsdk.algorithms.ratios import (
    DualClip,
    Metrics,
    clipped_surrogate,
    credit,
    dual_clipped,
    log_ratio,
    share_clipped,
    trained,
)
from rlsdk.batch import LossInputs
from rlsdk.batch.arithmetic import bounded
from rlsdk.limits import NonNegative
from rlsdk.marks import policy_loss

PER_ROLLOUT = ("seq-mean-token-mean",)
"""The aggregation for objectives defined as a mean over rollouts of a mean over tokens."""
LOG_SEQUENCE_RATIO_BOUND = 10.0
"""Upper bound that clamps a mean log-ratio (verl's; the paper gives none)."""


@policy_loss("gspo", aggregates=PER_ROLLOUT)
def gspo(
    x: LossInputs, *, clip_low: NonNegative = 3e-4, clip_high: NonNegative = 4e-4, dual_clip: DualClip | None = None
) -> tuple[Tensor, Metrics]:
    """PPO's clip on the ratio of the whole rollout: stable for long answers and mixtures of experts.

    The sequence ratio is detached and the gradient flows through the token, as in the paper's eq. 14. With one
    advantage per rollout and `seq-mean-token-mean`, the gradient equals that of eq. 5.
    Paper: GSPO, arXiv:2507.18071, eq. 5 to 7; bounds are the paper's.
    Formula: PPO's, with `s = sg[exp(mean_t(log π - log π_old))] · π / sg[π]` in place of `r`.
    When to use: rewards for whole answers, and mixtures of experts, whose token ratios are noisy.

    Args:
        x: The batch.
        clip_low: How far the ratio may fall below 1.
        clip_high: How far it may rise above 1.
        dual_clip: Maximum ratio in the loss of a rollout with negative advantage; null for none.
    """
    log_prob = trained(x, x.logprobs)
    mean = x.sequence_mean(log_ratio(x)).detach()
    ratio = (mean + log_prob - log_prob.detach()).clamp(max=LOG_SEQUENCE_RATIO_BOUND).exp()
    loss = dual_clipped(clipped_surrogate(credit(x), ratio, clip_low, clip_high), credit(x), dual_clip)
    return loss, {"clip_share": share_clipped(x, ratio, clip_low, clip_high)}


@policy_loss("gspo_token", aggregates=PER_ROLLOUT)
def gspo_token(
    x: LossInputs, *, clip_low: NonNegative = 3e-4, clip_high: NonNegative = 4e-4, dual_clip: DualClip | None = None
) -> tuple[Tensor, Metrics]:
    """GSPO for rollouts whose tokens differ in advantage (turns, steps); otherwise equal to `gspo`.

    Paper: GSPO-token, arXiv:2507.18071, eq. 13 and 14.
    Formula: as `gspo`, which already has this form.
    When to use: rollouts with rewards per turn or step.

    Args:
        x: The batch.
        clip_low: How far the ratio may fall below 1.
        clip_high: How far it may rise above 1.
        dual_clip: As in gspo.
    """
    return gspo(x, clip_low=clip_low, clip_high=clip_high, dual_clip=dual_clip)


@policy_loss("geo_mean", aggregates=PER_ROLLOUT)
def geo_mean(
    x: LossInputs, *, clip_low: NonNegative = 0.4, clip_high: NonNegative = 0.4, dual_clip: DualClip | None = None
) -> tuple[Tensor, Metrics]:
    """Geometric mean of token ratios, clipped in log space: single tokens cannot dominate.

    Paper: GMPO, arXiv:2507.20673; bounds `(e^-0.4, e^0.4)` are the paper's.
    Formula: `-Ā · exp(mean_t c_t)`, one value per rollout on all its tokens; `c_t` is the log-ratio clipped to
    `-clip_low…clip_high` where that makes the objective smaller, `Ā` the mean advantage.
    When to use: several updates per batch, where a few tokens with extreme ratios would dominate.

    Args:
        x: The batch.
        clip_low: How far the log-ratio may fall below 0.
        clip_high: How far it may rise above 0.
        dual_clip: Maximum geometric mean in the loss of a rollout with negative advantage; null for none.
    """
    difference, advantages = bounded(log_ratio(x)), credit(x)
    clipped = difference.clamp(-clip_low, clip_high)
    sign = advantages.sign()
    worse = sign * torch.minimum(sign * difference, sign * clipped)
    average = x.sequence_mean(advantages)
    loss = dual_clipped(-average * x.sequence_mean(worse).exp(), average, dual_clip)
    clipped_away = (worse != difference) & (advantages != 0)
    return loss, {"clip_share": masked_mean(clipped_away.float(), x.loss_mask)}
