"""A plugin of rlsdk in one file."""

from __future__ import annotations

import rlsdk
import torch
from rlsdk.kit import bounded, credit, log_ratio
from rlsdk.limits import NonNegative
from torch import Tensor


@rlsdk.policy_loss("my_policy_loss")
def my_policy_loss(x: rlsdk.LossInputs, *, clip: NonNegative = 0.2) -> Tensor:
    """PPO's clipped surrogate, one value per token: rlsdk masks, sums and divides.

    Paper: PPO, arXiv:1707.06347, eq. 7.
    Formula: `max(-A·r, -A·clip(r, 1 - clip, 1 + clip))`.

    Args:
        x: The batch: logprobs `[t]` carry the gradient, old_logprobs and advantages `[t]` do not.
        clip: How far the ratio may move from 1.

    Returns:
        float `[t]`; never a mean.
    """
    advantages, ratio = credit(x), bounded(log_ratio(x)).exp()
    return torch.maximum(-advantages * ratio, -advantages * ratio.clamp(1 - clip, 1 + clip))
