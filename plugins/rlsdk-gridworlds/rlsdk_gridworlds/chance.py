"""Random draws that depend only on the seed, in every process, on every machine and in every version of Python.

Only text seeding and `random()` of `random.Random` are used, since its other methods have changed between versions.
"""

from __future__ import annotations

from collections.abc import Sequence
from random import Random
from typing import TypeVar

T = TypeVar("T")


def pick(random: Random, items: Sequence[T]) -> T:
    """Pick an item uniformly."""
    return items[int(random.random() * len(items))]


def draw(random: Random, items: Sequence[T], count: int) -> list[T]:
    """Draw items without replacement, in random order."""
    left = list(items)
    return [left.pop(int(random.random() * len(left))) for _ in range(count)]
