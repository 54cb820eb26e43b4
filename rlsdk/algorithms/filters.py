"""Filters: whether, or which part of, a group is trained on. Only valid scores are looked at."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

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
    Formula: `low < share of rollouts with reward ≥ passing < high`.
    When to use: tasks of very different difficulty: those within reach teach most.

    Args:
        group: The group.
        low: The share must be above; below 0 for no bound.
        high: The share must be below; above 1 for no bound.
        passing: Reward from which on a rollout passes.
    """
    rewards = _rewards(group)
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
    Formula: the rollouts whose status is not `truncated`.
    When to use: answers that often hit the limit, and should not be punished for it.
    """
    whole = [i for i, rollout in enumerate(group.rollouts) if rollout.status != "truncated"]
    return _part(group, whole)


@marked("top_k")
def top_k(group: Group, *, k: Count = 1) -> bool | Group:
    """Keep the `k` rollouts with the greatest rewards: rejection sampling.

    Paper: RAFT, arXiv:2304.06767, algorithm 1. Of equal rewards the earlier rollout is kept.
    Formula: the `k` rollouts of greatest `r`.
    When to use: rejection sampling, with the loss `sft`.

    Args:
        group: The group.
        k: How many.
    """
    valid = [i for i, score in enumerate(group.scores) if score.valid]
    best = sorted(valid, key=lambda i: -group.scores[i].value)[: max(k, 0)]
    return _part(group, sorted(best))


@marked("best_worst")
def best_worst(group: Group) -> bool | Group:
    """Keep the best and the worst rollout, a pair for losses on preferences; drop a group whose rewards are equal.

    Paper: online preference pairs, arXiv:2402.04792, algorithm 1, with a reward in place of a judge.
    Formula: the rollouts of greatest and of least `r`, if `max r > min r`.
    When to use: losses on pairs: `dpo`.
    """
    valid = [i for i, score in enumerate(group.scores) if score.valid]
    if not nonzero_variance(group):
        return False
    by_reward = sorted(valid, key=lambda i: group.scores[i].value)
    return _part(group, [by_reward[-1], by_reward[0]])


def _rewards(group: Group) -> list[float]:
    return [score.value for score in group.scores if score.valid]


def _part(group: Group, index: Sequence[int]) -> bool | Group:
    if not index:
        return False
    return attrs.evolve(group, rollouts=[group.rollouts[i] for i in index], scores=[group.scores[i] for i in index])
