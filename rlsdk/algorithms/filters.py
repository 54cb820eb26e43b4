"""Filters: whether a group is trained on, or which part of it. Only valid scores are considered.

If an attempt at the task consists of several rollouts of one trajectory, selecting filters keep or drop all of them.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from statistics import fmean
from typing import Any

import attrs

from rlsdk.contracts import RunFacts
from rlsdk.limits import Count, NonNegative
from rlsdk.marks import filter as marked
from rlsdk.types import Group


@marked("nonzero_variance")
def nonzero_variance(group: Group) -> bool:
    """Keep a group whose rewards differ: equal rewards give zero advantage and teach nothing.

    Paper: dynamic sampling, DAPO, arXiv:2503.14476, eq. 11.
    Formula: `max r > min r`.
    When to use: rewards with few distinct values, such as right or wrong, where many groups have only one.
    """
    return len(set(_rewards(group))) > 1


def _leaves_room(_: RunFacts, options: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Refuse bounds that drop every group."""
    low, high = options["low"], options["high"]
    if low >= high:
        yield (
            "low",
            f"{low:g} with high={high:g}: no share is above one and below the other, and every group is dropped",
        )


@marked("pass_rate", check=_leaves_room)
def pass_rate(group: Group, *, low: float = 0.0, high: float = 1.0, passing: float = 1.0) -> bool:
    """Keep a group that is neither too hard nor too easy.

    Paper: DAPO, arXiv:2503.14476, eq. 11, with bounds.
    Formula: `low < share of rollouts with reward ≥ passing < high`; of a trajectory, only the last rollout counts.
    When to use: tasks of widely varying difficulty: those within reach teach most.

    Args:
        group: The group.
        low: Exclusive lower bound of the share; negative for none.
        high: Exclusive upper bound of the share; above 1 for none.
        passing: Minimum reward of a passing rollout.
    """
    rewards = [group.scores[trajectory[-1]].value for trajectory in group.scored_trajectories]
    return bool(rewards) and low < sum(r >= passing for r in rewards) / len(rewards) < high


@marked("min_std")
def min_std(group: Group, *, threshold: NonNegative = 0.0) -> bool:
    """Keep a group whose rewards have enough spread; with threshold 0, the same as `nonzero_variance`.

    Source: Trinity-RFT (reward_std_filter).
    Formula: `σ > threshold`, the unbiased standard deviation.
    When to use: continuous rewards, which are never exactly equal.

    Args:
        group: The group.
        threshold: Exclusive lower bound of the standard deviation.
    """
    rewards = _rewards(group)
    return len(set(rewards)) > 1 and statistics.stdev(rewards) > threshold


@marked("truncated", reads_rewards=False)
def truncated(group: Group) -> bool | Group:
    """Drop truncated rollouts: their reward says little about the answer they would have given.

    Paper: overlong filtering, DAPO, arXiv:2503.14476, §3.4. Here they are also excluded from the baseline.
    Formula: the rollouts whose status is not `truncated`, in trajectories without one.
    When to use: answers that often hit the token limit and should not be penalised for it.
    """
    cut = [any(group.rollouts[i].status == "truncated" for i in trajectory) for trajectory in group.trajectories]
    return _part(group, [t for t, is_cut in zip(group.trajectories, cut, strict=True) if not is_cut])


@marked("top_k")
def top_k(group: Group, *, k: Count = 1) -> bool | Group:
    """Keep the `k` rollouts with the highest rewards: rejection sampling.

    Paper: RAFT, arXiv:2304.06767, algorithm 1. Ties go to the earlier rollout.
    Formula: the `k` rollouts, or trajectories, with the highest `r`; a trajectory's is the mean over its rollouts.
    When to use: rejection sampling, with the loss `sft`.

    Args:
        group: The group.
        k: Number of rollouts to keep.
    """
    best = sorted(group.scored_trajectories, key=lambda each: -fmean(group.scores[i].value for i in each))
    return _part(group, best[: max(k, 0)])


@marked("best_worst")
def best_worst(group: Group) -> bool | Group:
    """Keep the best and the worst rollout, a pair for preference losses; drop a group whose rewards are equal.

    Paper: online preference pairs, arXiv:2402.04792, algorithm 1, with a reward in place of a judge.
    Formula: the rollouts with the highest and lowest `r`, if `max r > min r`; of a trajectory, only the last rollout.
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
