"""Buffer policies and stop rules: which groups are trained first, which are dropped, and when a batch is complete.

The highest priority comes first; ties go to the task issued first. `None` drops a group. The same policy orders groups
waiting to be trained for the first time (`uses` 0) and those that may be trained again.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Mapping
from typing import Any

from rlsdk.contracts import RunFacts
from rlsdk.marks import buffer, stop
from rlsdk.options import unknown
from rlsdk.types import Group


@buffer("fifo", reads_rewards=False)
def fifo(group: Group, *, step: int, uses: int) -> float:
    """First in, first out by the order in which tasks were issued; when replaying, least used first.

    Source: the queue of every asynchronous trainer, such as AReaL, arXiv:2505.24298, section 4.
    Formula: `p = -u`, where `u` is the number of times the group was trained.
    When to use: by default; no kind of task is delayed.

    Args:
        group: The group.
        step: Training steps completed.
        uses: Number of times the group was trained.
    """
    return -float(uses)


@buffer("stalest_first", reads_rewards=False)
def stalest_first(group: Group, *, step: int, uses: int) -> float:
    """Prefer the group closest to expiring: the one sampled with the oldest weights.

    Source: XTuner, which trains the stalest available group first.
    Formula: `p = s - v`, with `s` the steps completed and `v` the oldest version that sampled a token; 0 if none was
    sampled.
    When to use: long-tailed lengths with a tight `max_staleness`, where many groups would expire.

    Args:
        group: The group.
        step: Training steps completed.
        uses: Number of times the group was trained.
    """
    return float(_age(group, step))


def _by_is_reported(run: RunFacts, options: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Refuse a reward part that the run does not have, since every group would have the same value."""
    kind, _, name = str(options["by"]).partition("/")
    if kind == "reward" and name and run.rewards and name not in run.rewards:
        yield "by", unknown("part of the reward", name, run.rewards)


@buffer("priority", check=_by_is_reported)
def priority(
    group: Group,
    *,
    step: int,
    uses: int,
    by: str = "",
    sign: float = 1.0,
    age_decay: float = 0.1,
    use_decay: float = 1.0,
    least: float | None = None,
) -> float | None:
    """Prefer groups of high value; the value decays with age and uses.

    The decay is linear, so that negative values also decrease with age, and age alone never reorders two groups.
    Source: Trinity-RFT (linear decay of the version by uses), with a value in place of the version.
    Formula: `p = sign x - age_decay (s - v) - use_decay u`: value `x`, steps completed `s`, oldest version `v`, uses
    `u`.
    When to use: rewards with few distinct values, where groups of equal rewards teach nothing; replay.

    Args:
        group: The group.
        step: Training steps completed.
        uses: Number of times the group was trained.
        by: Metric of scores or rollouts (such as `reward/countdown`), averaged over the group; `reward` for the mean
            reward; by default, the standard deviation of the group's rewards (over n).
        sign: Factor of the value; if negative, small values come first.
        age_decay: Amount subtracted per step of age of the group's oldest weights.
        use_decay: Amount subtracted per time that the group was trained.
        least: Minimum value, including sign, below which a group is dropped; null drops none.
    """
    value = sign * _value(group, by)
    if least is not None and value < least:
        return None
    return value - age_decay * _age(group, step) - use_decay * uses


def _age(group: Group, step: int) -> int:
    """Return the steps since the oldest weights that sampled a token; 0 if none was sampled."""
    return 0 if group.oldest_version is None else step - group.oldest_version


def _value(group: Group, by: str) -> float:
    """Return the value that ranks a group; 0 if no rollout reports it."""
    valid = [(r, s) for r, s in zip(group.rollouts, group.scores, strict=True) if s.valid]
    if not by:
        return statistics.pstdev([s.value for _, s in valid]) if valid else 0.0
    if by == "reward":
        found = [s.value for _, s in valid]
    else:
        found = [float(metrics[by]) for r, s in valid if by in (metrics := {**r.metrics, **s.metrics})]
    return statistics.fmean(found) if found else 0.0


@stop("all")
def all_there(*, available: int, target: int) -> bool:
    """Wait for the whole batch.

    Source: standard synchronous batches.
    Formula: `available ≥ target`.
    When to use: always, unless a step waits long for its last groups.

    Args:
        available: Number of available groups.
        target: Number of groups in a batch.
    """
    return available >= target


@stop("enough")
def enough(*, available: int, target: int, share: float = 0.8) -> bool:
    """Continue with part of the batch; groups that finish later go into the next batches.

    Batches shrink by the missing groups, whose tasks continue to run without being restarted: over many steps, as many
    groups are trained as are sampled. A batch has at least one group.
    Source: Trinity-RFT (the complement of its `over_rollout.ratio`).
    Formula: `available ≥ max(1, ceil(share · target))`.
    When to use: long-tailed lengths, where the last groups of a batch keep the others waiting.

    Args:
        available: Number of available groups.
        target: Number of groups in a batch.
        share: Share of the batch that is enough; 1 or more for all of it.
    """
    # Rounded, since 0.55 · 20 is a little above 11 in floating point.
    return available >= min(target, max(1, math.ceil(round(share * target, 9))))
