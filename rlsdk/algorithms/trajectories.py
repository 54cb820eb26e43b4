"""Advantages for step-wise workflows, where several rollouts are the steps of one trajectory.

A group holds the trajectories of one task. `relative` means minus the mean of a set and, if requested, divided by its
standard deviation; a set of one, or of equal values, gives zero.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from rlsdk.algorithms.packed import Segments
from rlsdk.batch import CreditInputs, Groups, wide
from rlsdk.limits import NonNegative, Share
from rlsdk.marks import advantage


@advantage("step_grpo", needs=("trajectories", "steps"))
def step_grpo(
    x: CreditInputs,
    *,
    credit: Literal["broadcast", "step"] = "broadcast",
    std_normalize: bool = True,
    divide_by_steps: bool = False,
) -> Tensor:
    """GRPO for step-wise trajectories.

    Source: rLLM and Trinity-RFT (step_wise_grpo) for `broadcast`; GRPO, arXiv:2402.03300, §4.1.3 (process supervision)
    for the comparison per step.
    Formula: `broadcast`: the reward of a trajectory's last step, relative to the other trajectories of the group, for
    all its steps. `step`: each step's reward, relative to the same step of the other trajectories.
    When to use: agents whose steps are separate rollouts: `broadcast` if only the end is rewarded, `step` if each step
    is.

    Args:
        x: The batch.
        credit: Method, `broadcast` or `step`.
        std_normalize: Divide by `σ + 1e-6`.
        divide_by_steps: Divide by the number of steps, so that long trajectories weigh no more than short ones.
    """
    rewards, trajectories = wide(x.outcomes), Groups.by(x.groups, x.trajectories)
    if credit == "step":
        advantages = Groups.by(x.groups, x.steps).centred(rewards, std_normalize=std_normalize)
    else:
        last = (x.steps == trajectories.max(x.steps)).to(rewards.dtype)
        final = trajectories.weighted_mean(rewards, last)
        advantages = _between(trajectories, final, x.groups, std_normalize)
    return advantages / trajectories.members() if divide_by_steps else advantages


@advantage("gigpo", needs=("trajectories", "steps", "states"))
def gigpo(x: CreditInputs, *, omega: NonNegative = 1.0, gamma: Share = 0.95, std_normalize: bool = False) -> Tensor:
    """Credit for the trajectory, plus credit for actions in states that several trajectories passed through.

    Paper: GiGPO, arXiv:2505.10978.
    Formula: `A = A_E + ω·A_S`: `A_E` the trajectory's total reward relative to the group's other trajectories, `A_S`
    the step's discounted return `Σ_k γ^k r_{t+k}` relative to the steps of the group in an equal state. Where only the
    last rollout of a trajectory was scored, `r` is 0 for those before it.
    When to use: agents in worlds whose states repeat: games, web sites, households.

    Args:
        x: The batch.
        omega: Weight of the step's part.
        gamma: Discount per step.
        std_normalize: Divide both by `σ + 1e-6` (the paper's F_norm = std), else by 1.
    """
    rewards, trajectories = wide(x.outcomes), Groups.by(x.groups, x.trajectories)
    if hasattr(x, "shared_scores"):  # a sum of copies would grow with their number
        rewards = torch.where(x.shared_scores & (x.steps < trajectories.max(x.steps)), 0, rewards)
    episode = _between(trajectories, trajectories.sum(rewards), x.groups, std_normalize)
    # Discounted rewards from each step to the end of its trajectory.
    order = torch.argsort(x.steps, stable=True)
    order = order[torch.argsort(trajectories.index[order], stable=True)]
    to_go = Segments.of(torch.bincount(trajectories.index)).to_go(rewards[order], gamma)
    returns = torch.empty_like(to_go).index_copy(0, order, to_go)
    anchored = Groups.by(x.groups, x.states).centred(returns, std_normalize=std_normalize)
    return episode + omega * anchored


def _between(trajectories: Groups, values: Tensor, groups: Tensor, std_normalize: bool) -> Tensor:
    """Return a trajectory's value relative to its group, counting each trajectory once, on all its steps."""
    first = trajectories.first
    return Groups(groups[first]).centred(values[first], std_normalize=std_normalize)[trajectories.index]
