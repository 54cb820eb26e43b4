"""Advantages with a baseline from the group: one value per rollout, from the reward `r` of each.

`μ` and `σ` are mean and unbiased standard deviation of the rewards of a group. A group with one member, or with equal
rewards, has advantage zero.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from rlsdk.batch import EPSILON, CreditInputs, wide
from rlsdk.components import advantage


@advantage("grpo")
def grpo(x: CreditInputs, *, std_normalize: bool = True, std_over: Literal["group", "batch"] = "group") -> Tensor:
    """Reward relative to the group: the default where a reward checks a whole answer.

    Paper: GRPO, arXiv:2402.03300, §4.1.2; without the division Dr. GRPO, arXiv:2503.20783, eq. 3; with the standard
    deviation of the batch arXiv:2508.08221.
    Formula: `A = (r - μ) / (σ + 1e-6)`.

    Args:
        x: The batch.
        std_normalize: Divide by the standard deviation; without it, hard and easy tasks weigh by their spread.
        std_over: Whose standard deviation: the group's, or that of all rewards of the batch.
    """
    rewards = wide(x.outcomes)
    centred = rewards - x.group_mean(rewards)
    if not std_normalize:
        return centred
    return centred / ((x.group_std(rewards) if std_over == "group" else _std(rewards)) + EPSILON)


@advantage("rloo")
def rloo(x: CreditInputs) -> Tensor:
    """Reward against the mean of the *other* rollouts of the group: unbiased, for groups of two on.

    Paper: RLOO, arXiv:2402.14740, eq. 6.
    Formula: `A = r - mean of the others = g / (g - 1) · (r - μ)` with `g` rollouts in the group.
    """
    rewards = wide(x.outcomes)
    size = x.group_size()
    return (rewards - x.group_mean(rewards)) * size / (size - 1).clamp(min=1)


@advantage("constant")
def constant(x: CreditInputs, *, value: float = 1.0) -> Tensor:
    """The same for every token, whatever the reward: for losses on demonstrations or chosen rollouts.

    Formula: `A = value`.

    Args:
        x: The batch.
        value: The advantage.
    """
    return torch.full_like(wide(x.rewards), value)


def _std(values: Tensor) -> Tensor:
    """Unbiased standard deviation of all values; 0 for fewer than two."""
    return values.std() if len(values) > 1 else values.new_zeros(())
