"""Policy losses whose ratio is that of the whole rollout, not of a token."""

from __future__ import annotations

import torch
from torch import Tensor

from rlsdk.algorithms.packed import masked_mean
from rlsdk.algorithms.ratios import Metrics, bounded, clipped_surrogate, credit, log_ratio, share_clipped, trained
from rlsdk.batch import LossInputs
from rlsdk.components import policy_loss

LOG_SEQUENCE_RATIO_BOUND = 10.0
"""Above it a mean log-ratio is clamped (verl's; the paper is silent)."""


@policy_loss("gspo")
def gspo(x: LossInputs, *, clip_low: float = 3e-4, clip_high: float = 4e-4) -> tuple[Tensor, Metrics]:
    """PPO's clip on the ratio of the whole rollout: steady for long answers and mixtures of experts.

    The ratio of the sequence is detached and the gradient goes through the token, as in the paper's eq. 14: with one
    advantage per rollout and `seq-mean-token-mean` the gradient is that of eq. 5.
    Paper: GSPO, arXiv:2507.18071, eq. 5 to 7; bounds are the paper's.
    Formula: PPO's with `s = sg[exp(mean_t(log π - log π_old))] · π / sg[π]` in place of `r`.
    When to use: rewards for whole answers, and mixtures of experts, whose token ratios jump.

    Args:
        x: The batch.
        clip_low: How far the ratio may fall below 1.
        clip_high: How far it may rise above 1.
    """
    log_prob = trained(x, x.logprobs)
    mean = x.sequence_mean(log_ratio(x)).detach()
    ratio = (mean + log_prob - log_prob.detach()).clamp(max=LOG_SEQUENCE_RATIO_BOUND).exp()
    loss = clipped_surrogate(credit(x), ratio, clip_low, clip_high)
    return loss, {"clip_share": share_clipped(x, ratio, clip_low, clip_high)}


@policy_loss("gspo_token")
def gspo_token(x: LossInputs, *, clip_low: float = 3e-4, clip_high: float = 4e-4) -> tuple[Tensor, Metrics]:
    """GSPO where the tokens of a rollout differ in advantage (turns, steps); equal to `gspo` where they do not.

    Paper: GSPO-token, arXiv:2507.18071, eq. 13 and 14.
    Formula: as `gspo`, which is written in this form already.
    When to use: turns or steps of one rollout with rewards of their own.

    Args:
        x: The batch.
        clip_low: How far the ratio may fall below 1.
        clip_high: How far it may rise above 1.
    """
    return gspo(x, clip_low=clip_low, clip_high=clip_high)


@policy_loss("geo_mean")
def geo_mean(x: LossInputs, *, clip_low: float = 0.4, clip_high: float = 0.4) -> tuple[Tensor, Metrics]:
    """The geometric mean of the tokens' ratios, clipped in log space: single tokens cannot dominate.

    Paper: GMPO, arXiv:2507.20673; bounds `(e^-0.4, e^0.4)` are the paper's.
    Formula: `-Ā · exp(mean_t c_t)`, one value per rollout on all its tokens; `c_t` is the log-ratio clipped to
    `-clip_low…clip_high` where that makes the objective smaller, `Ā` the mean advantage. To be aggregated by
    `seq-mean-token-mean`.
    When to use: several updates per batch, where a few tokens with extreme ratios would dominate.

    Args:
        x: The batch.
        clip_low: How far the log-ratio may fall below 0.
        clip_high: How far it may rise above 0.
    """
    difference, advantages = bounded(log_ratio(x)), credit(x)
    clipped = difference.clamp(-clip_low, clip_high)
    sign = advantages.sign()
    worse = sign * torch.minimum(sign * difference, sign * clipped)
    loss = -x.sequence_mean(advantages) * x.sequence_mean(worse).exp()
    return loss, {"clip_share": masked_mean((worse != difference).float(), x.loss_mask)}
