"""Chance that is the same for a seed in every process, on every machine and in every version of Python.

Of `random.Random` only seeding by text and `random()` are used: how its other methods use them has changed before.
"""

from __future__ import annotations

from collections.abc import Sequence
from random import Random
from typing import TypeVar

T = TypeVar("T")


def pick(random: Random, items: Sequence[T]) -> T:
    """One of the items, each as likely."""
    return items[int(random.random() * len(items))]


def draw(random: Random, items: Sequence[T], count: int) -> list[T]:
    """Different items, in the order in which they were drawn."""
    left = list(items)
    return [left.pop(int(random.random() * len(left))) for _ in range(count)]
