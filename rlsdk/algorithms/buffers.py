"""Buffer policies: which of the groups that are there are trained first, and which never.

The greatest priority comes first; of equal ones, the task that was issued first. `None` drops a group. The same policy
orders groups that wait to be trained for the first time (`uses` 0) and those that may be trained again.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping
from typing import Any

from rlsdk.contracts import RunFacts
from rlsdk.marks import buffer
from rlsdk.options import unknown
from rlsdk.types import Group


@buffer("fifo", reads_rewards=False)
def fifo(group: Group, *, step: int, uses: int) -> float:
    """First come, first trained: the group whose task was issued first; to train again, what was used least.

    Source: the queue of every asynchronous trainer, such as AReaL, arXiv:2505.24298, section 4.
    Formula: `p = -u`, with `u` the times it was trained.
    When to use: by default; no kind of task is put off.

    Args:
        group: The group.
        step: Steps that are done.
        uses: Times that it was trained.
    """
    return -float(uses)


@buffer("stalest_first", reads_rewards=False)
def stalest_first(group: Group, *, step: int, uses: int) -> float:
    """Prefer the group that is closest to expiring: the one with the oldest weights.

    Source: XTuner, which takes the stalest of what is there first.
    Formula: `p = s - v`, with `s` the steps done and `v` the least version that sampled a token; 0 where none was.
    When to use: long-tailed lengths with a tight `max_staleness`, where much would expire.

    Args:
        group: The group.
        step: Steps that are done.
        uses: Times that it was trained.
    """
    return float(_age(group, step))


def _by_is_reported(run: RunFacts, options: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Refuse a part of the reward that the run does not have: every group would have the same value."""
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
    """Prefer groups of great value, which falls with every step of age and every use.

    Linear, so that values below zero lose by age, too, and that age alone never turns the order of two groups.
    Source: Trinity-RFT (linear decay of a version by uses), with a value in place of the version.
    Formula: `p = sign x - age_decay (s - v) - use_decay u`: value `x`, steps done `s`, least version `v`, uses `u`.
    When to use: rewards of few values, where groups of equal rewards teach nothing; experience that is used again.

    Args:
        group: The group.
        step: Steps that are done.
        uses: Times that it was trained.
        by: A metric of scores or rollouts (such as `reward/countdown`), of which the group's mean counts; `reward` for
            the mean reward; left out, the spread of its rewards (standard deviation, over n).
        sign: Factor of the value; below zero, small values come first.
        age_decay: Amount subtracted for each step of age of the group's oldest weights.
        use_decay: Off for each time that it was trained.
        least: Drops a group whose value, with its sign, is below; null drops none.
    """
    value = sign * _value(group, by)
    if least is not None and value < least:
        return None
    return value - age_decay * _age(group, step) - use_decay * uses


def _age(group: Group, step: int) -> int:
    """Steps since the oldest weights that sampled a token; 0 without any."""
    return 0 if group.oldest_version is None else step - group.oldest_version


def _value(group: Group, by: str) -> float:
    """Value of a group by which it is ranked; 0 if no rollout reports it."""
    valid = [(r, s) for r, s in zip(group.rollouts, group.scores, strict=True) if s.valid]
    if not by:
        return statistics.pstdev([s.value for _, s in valid]) if valid else 0.0
    if by == "reward":
        found = [s.value for _, s in valid]
    else:
        found = [float(metrics[by]) for r, s in valid if by in (metrics := {**r.metrics, **s.metrics})]
    return statistics.fmean(found) if found else 0.0
