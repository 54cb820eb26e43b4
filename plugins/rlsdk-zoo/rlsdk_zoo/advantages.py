"""Advantages with a group baseline: maxrl."""

from __future__ import annotations

import torch
from torch import Tensor

import rlsdk
from rlsdk.batch import EPSILON


@rlsdk.advantage("maxrl")
def maxrl(x: rlsdk.CreditInputs) -> Tensor:
    """Reward relative to the group's mean, divided by it: hard tasks weigh more, as in maximum likelihood.

    For rewards of 0 and 1, `μ` estimates the chance of a right answer, and the gradient approaches that of its
    logarithm, which for large groups is the likelihood of right answers. Groups whose mean is not above 0 get 0, since
    with negative rewards the mean does not estimate a chance.
    Paper: maximum likelihood reinforcement learning, arXiv:2602.02710; as in SkyRL.
    Formula: `A = (r - μ) / (μ + 1e-6)`.
    When to use: rewards from 0 (wrong) to 1 (right), large groups, and tasks that are seldom solved. It raises pass@k.
    """
    mean = x.group_mean(x.outcomes)
    centred = x.outcomes.to(mean.dtype) - mean
    return torch.where(mean > 0, centred / (mean.clamp(min=0) + EPSILON), 0)
