"""Filters: whether, or which part of, a group is trained on. Only valid scores are looked at."""

from __future__ import annotations

from rlsdk.components import filter as marked
from rlsdk.types import Group


@marked("nonzero_variance")
def nonzero_variance(group: Group) -> bool:
    """Keep a group whose rewards differ: equal ones have advantage zero and teach nothing.

    Paper: dynamic sampling, DAPO, arXiv:2503.14476, eq. 11.
    """
    return len(set(rewards(group))) > 1


def rewards(group: Group) -> list[float]:
    """The rewards of the rollouts that could be scored."""
    return [score.value for score in group.scores if score.valid]
