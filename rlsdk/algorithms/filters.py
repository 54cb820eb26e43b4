"""Filters: whether, or which part of, a group is trained on. Only valid scores are looked at.

Where an attempt at the task is several rollouts of one trajectory, filters that choose take or leave all of them.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from statistics import fmean

import attrs

from rlsdk.limits import Count, NonNegative
from rlsdk.marks import filter as marked
from rlsdk.types import Group


@marked("nonzero_variance")
def nonzero_variance(group: Group) -> bool:
    """Keep a group whose rewards differ: equal ones have advantage zero and teach nothing.

    Paper: dynamic sampling, DAPO, arXiv:2503.14476, eq. 11.
    Formula: `max r > min r`.
    When to use: rewards of few values, right or wrong, where many groups are all of one kind.
    """
    return len(set(_rewards(group))) > 1


@marked("pass_rate")
def pass_rate(group: Group, *, low: float = 0.0, high: float = 1.0, passing: float = 1.0) -> bool:
    """Keep a group that is neither too hard nor too easy.

    Paper: DAPO, arXiv:2503.14476, eq. 11, with bounds.
    Formula: `low < share of rollouts with reward ≥ passing < high`; of a trajectory its last rollout counts.
    When to use: tasks of very different difficulty: those within reach teach most.

    Args:
        group: The group.
        low: The share must be above; below 0 for no bound.
        high: The share must be below; above 1 for no bound.
        passing: Reward from which on a rollout passes.
    """
    rewards = [group.scores[trajectory[-1]].value for trajectory in group.scored_trajectories]
    return bool(rewards) and low < sum(r >= passing for r in rewards) / len(rewards) < high


@marked("min_std")
def min_std(group: Group, *, threshold: NonNegative = 0.0) -> bool:
    """Keep a group whose rewards are spread enough; 0 keeps what `nonzero_variance` keeps.

    Source: Trinity-RFT (reward_std_filter).
    Formula: `σ > threshold`, the unbiased standard deviation.
    When to use: continuous rewards, which are never quite equal.

    Args:
        group: The group.
        threshold: The standard deviation must be above.
    """
    rewards = _rewards(group)
    return len(set(rewards)) > 1 and statistics.stdev(rewards) > threshold


@marked("truncated", reads_rewards=False)
def truncated(group: Group) -> bool | Group:
    """Leave out rollouts that a limit cut off: their reward says little of what they were up to.

    Paper: overlong filtering, DAPO, arXiv:2503.14476, §3.4. Here they leave the baseline too.
    Formula: the rollouts whose status is not `truncated`, in trajectories without one.
    When to use: answers that often hit the limit, and should not be punished for it.
    """
    cut = [any(group.rollouts[i].status == "truncated" for i in trajectory) for trajectory in group.trajectories]
    return _part(group, [t for t, is_cut in zip(group.trajectories, cut, strict=True) if not is_cut])


@marked("top_k")
def top_k(group: Group, *, k: Count = 1) -> bool | Group:
    """Keep the `k` rollouts with the greatest rewards: rejection sampling.

    Paper: RAFT, arXiv:2304.06767, algorithm 1. Of equal rewards the earlier rollout is kept.
    Formula: the `k` rollouts, or trajectories, of greatest `r`; of a trajectory the mean over its rollouts.
    When to use: rejection sampling, with the loss `sft`.

    Args:
        group: The group.
        k: How many.
    """
    best = sorted(group.scored_trajectories, key=lambda each: -fmean(group.scores[i].value for i in each))
    return _part(group, best[: max(k, 0)])


@marked("best_worst")
def best_worst(group: Group) -> bool | Group:
    """Keep the best and the worst rollout, a pair for losses on preferences; drop a group whose rewards are equal.

    Paper: online preference pairs, arXiv:2402.04792, algorithm 1, with a reward in place of a judge.
    Formula: the rollouts of greatest and of least `r`, if `max r > min r`; of a trajectory its last rollout alone.
    When to use: losses on pairs: `dpo`.
    """
    lasts = [trajectory[-1] for trajectory in group.scored_trajectories]
    by_reward = sorted(lasts, key=lambda i: group.scores[i].value)
    if not lasts or group.scores[by_reward[-1]].value == group.scores[by_reward[0]].value:
        return False
    return _chosen(group, [by_reward[-1], by_reward[0]])


def _rewards(group: Group) -> list[float]:
    return [score.value for score in group.scores if score.valid]


def _part(group: Group, trajectories: Sequence[Sequence[int]]) -> bool | Group:
    return _chosen(group, sorted(i for trajectory in trajectories for i in trajectory))


def _chosen(group: Group, index: Sequence[int]) -> bool | Group:
    if not index:
        return False
    return attrs.evolve(group, rollouts=[group.rollouts[i] for i in index], scores=[group.scores[i] for i in index])
