"""Policy losses per token: policy gradients, and PPO's clipped surrogate.

`r = π / π_old` is the ratio of a token, `A` its advantage, `sg[·]` stops the gradient. The core
masks, sums and divides.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rlsdk.algorithms.packed import masked_mean
from rlsdk.algorithms.ratios import bounded, clipped_surrogate, log_ratio, share_clipped, trained
from rlsdk.batch import LossInputs
from rlsdk.components import policy_loss

Metrics = dict[str, Tensor]


@policy_loss("ppo")
def ppo(
    x: LossInputs, *, clip_low: float = 0.2, clip_high: float = 0.2, dual_clip: float | None = 3.0
) -> tuple[Tensor, Metrics]:
    """The clipped surrogate: several updates on one batch without going far; the default of most methods.

    Paper: PPO, arXiv:1707.06347, eq. 7; bounds apart (clip-higher) DAPO, arXiv:2503.14476, eq. 10; the dual clip
    arXiv:1912.09729, eq. 5.
    Formula: `max(-A·r, -A·clip(r, 1 - clip_low, 1 + clip_high))`, for `A < 0` at most `-A·dual_clip`. The log-ratio is
    clamped to ±20.

    Args:
        x: The batch.
        clip_low: How far the ratio may fall below 1.
        clip_high: How far it may rise above 1; more than `clip_low` leaves room for unlikely tokens.
        dual_clip: Greatest ratio that a token with negative advantage is charged for; null for none.
    """
    ratio, advantages = bounded(log_ratio(x)).exp(), trained(x, x.advantages)
    loss = clipped_surrogate(advantages, ratio, clip_low, clip_high)
    metrics = {"clip_share": share_clipped(x, ratio, clip_low, clip_high)}
    if dual_clip is not None:
        capped = (advantages < 0) & (loss > -advantages * dual_clip)
        loss = torch.where(capped, -advantages * dual_clip, loss)
        metrics["dual_clip_share"] = masked_mean(capped.float(), x.loss_mask)
    return loss, metrics | {"old_kl": masked_mean(-log_ratio(x), x.loss_mask)}


@policy_loss("reinforce")
def reinforce(x: LossInputs) -> Tensor:
    """The plain policy gradient: exact for one update per batch, on samples of the current policy.

    Paper: REINFORCE, Williams 1992 (doi:10.1007/BF00992696), for language models arXiv:2402.14740, eq. 4.
    Formula: `-A · log π`.
    """
    return -trained(x, x.advantages) * trained(x, x.logprobs)


@policy_loss("sft")
def sft(x: LossInputs) -> Tensor:
    """Maximum likelihood of what is trained on, whatever the advantage: demonstrations, chosen rollouts.

    Formula: `-log π`.
    """
    return -trained(x, x.logprobs)
