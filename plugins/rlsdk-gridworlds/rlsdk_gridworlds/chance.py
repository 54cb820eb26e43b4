"""Random draws that are equal for a seed in every process, on every machine and in every version of Python.

Only text seeding and `random()` of `random.Random` are used: its other methods have changed between versions before.
"""

from __future__ import annotations

from collections.abc import Sequence
from random import Random
from typing import TypeVar

T = TypeVar("T")


def pick(random: Random, items: Sequence[T]) -> T:
    """Pick one of the items uniformly."""
    return items[int(random.random() * len(items))]


def draw(random: Random, items: Sequence[T], count: int) -> list[T]:
    """Draw different items, in random order."""
    left = list(items)
    return [left.pop(int(random.random() * len(left))) for _ in range(count)]
