"""Policy losses that learn from an expert's answers and the policy's own."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

import rlsdk
from rlsdk.kit import Metrics, mix, per_fits, trained
from rlsdk.limits import NonNegative, Share


@rlsdk.policy_loss("mix_chord", needs=("expert",), whole_batch=True, check=per_fits)
def mix_chord(
    x: rlsdk.LossInputs,
    *,
    mu: Share = 0.1,
    clip_low: NonNegative = 0.2,
    clip_high: NonNegative = 0.2,
    per: Literal["token", "rollout"] | None = None,
) -> tuple[Tensor, Metrics]:
    """The loss `mix` with a weight on each expert token: certain and very unlikely tokens count little.

    This is the paper's final objective, CHORD-φ, with a fixed μ. CHORD-μ, which has no φ and a decaying μ, is the
    algorithm `zoo/chord_mu`: the core's loss `mix` with a schedule.
    Paper: CHORD, arXiv:2508.11408, eq. 2, 3, 5 and 6.
    Formula: `(1 - μ)·mean(ppo over the policy's) + μ·mean(-sg[φ] · log π over the expert's)` with `φ = π · (1 - π)`;
    each part is scaled so that the core's division yields the part's own denominator.
    When to use: training on an expert's answers and the policy's own, without the dip that imitation causes.

    Args:
        x: The batch.
        mu: Weight of the expert part, μ.
        clip_low: How far PPO's ratio may fall below 1.
        clip_high: How far it may rise above 1.
        per: Divisor of the aggregation: `token` for token-mean, `rollout` for the seq-mean modes; null follows the
            run's aggregation.
    """
    loss, metrics = mix(x, mu=mu, clip_low=clip_low, clip_high=clip_high, dual_clip=None, per=per)
    probability = trained(x, x.logprobs).detach().clamp(max=0).exp()
    return loss * torch.where(x.expert[x.segments], probability * (1 - probability), 1), metrics
