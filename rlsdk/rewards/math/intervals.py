"""Sets of real numbers: unions of intervals, and solutions of inequalities in one variable."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cmp_to_key

import attrs

from rlsdk.rewards.math import values
from rlsdk.rewards.math.values import Number

INFINITY = float("inf")


@attrs.frozen
class Interval:
    """An interval of real numbers, whose ends may be infinite or included; a single number if both are equal."""

    low: Number
    high: Number
    low_in: bool
    high_in: bool

    @property
    def empty(self) -> bool:
        """True if the interval contains no number."""
        order = compare(self.low, self.high)
        return order > 0 or (order == 0 and not (self.low_in and self.high_in))


REALS = (Interval(-INFINITY, INFINITY, False, False),)


def compare(a: Number, b: Number) -> int:
    """Return -1, 0 or 1 if `a` is below, equal to or above `b`, both real."""
    if values.close(a, b):
        return 0
    if isinstance(a, float) or isinstance(b, float):
        return -1 if a == -INFINITY or b == INFINITY else 1
    difference = values.real_part(values.add([a, values.negate(b)]))
    if difference is None:
        raise values.NoValueError("complex numbers have no order")
    return -1 if difference < 0 else 1


def union(intervals: Iterable[Interval]) -> tuple[Interval, ...]:
    """Merge intervals into the fewest disjoint ones, in order."""
    some = [interval for interval in intervals if not interval.empty]
    ordered = sorted(some, key=cmp_to_key(_in_order))
    found: list[Interval] = []
    for interval in ordered:
        if found and _meet(found[-1], interval):
            found[-1] = _joined(found[-1], interval)
        else:
            found.append(interval)
    return tuple(found)


def _in_order(first: Interval, second: Interval) -> int:
    return compare(first.low, second.low) or second.low_in - first.low_in


def _meet(first: Interval, second: Interval) -> bool:
    """Return True if there is no gap between two intervals."""
    order = compare(first.high, second.low)
    return order > 0 or (order == 0 and (first.high_in or second.low_in))


def _joined(first: Interval, second: Interval) -> Interval:
    order = compare(first.high, second.high)
    if order > 0:
        return first
    return attrs.evolve(first, high=second.high, high_in=second.high_in or (order == 0 and first.high_in))


def intersection(first: Sequence[Interval], second: Sequence[Interval]) -> tuple[Interval, ...]:
    """Return the intersection of two sets."""
    return union(_overlap(a, b) for a in first for b in second)


def _overlap(a: Interval, b: Interval) -> Interval:
    low, high = compare(a.low, b.low), compare(a.high, b.high)
    return Interval(
        a.low if low >= 0 else b.low,
        a.high if high <= 0 else b.high,
        (a.low_in or low < 0) and (b.low_in or low > 0),
        (a.high_in or high > 0) and (b.high_in or high < 0),
    )


def complement(intervals: Sequence[Interval]) -> tuple[Interval, ...]:
    """Return the set of all other real numbers."""
    found: tuple[Interval, ...] = REALS
    for interval in union(intervals):
        below = Interval(-INFINITY, interval.low, False, not interval.low_in)
        above = Interval(interval.high, INFINITY, not interval.high_in, False)
        found = intersection(found, (below, above))
    return found


def same(first: Sequence[Interval], second: Sequence[Interval]) -> bool:
    """Return True if two results of `union` are the same set."""
    return len(first) == len(second) and all(
        (a.low_in, a.high_in) == (b.low_in, b.high_in) and compare(a.low, b.low) == compare(a.high, b.high) == 0
        for a, b in zip(first, second, strict=True)
    )


def half_line(sign: str, bound: Number) -> tuple[Interval, ...]:
    """Return the numbers x with `x SIGN bound`, for `<`, `<=`, `>`, `>=`, `=` and `!=`."""
    if sign == "=":
        return (Interval(bound, bound, True, True),)
    if sign == "!=":
        return complement([Interval(bound, bound, True, True)])
    closed = sign.endswith("=")
    if sign.startswith("<"):
        return (Interval(-INFINITY, bound, False, closed),)
    return (Interval(bound, INFINITY, closed, False),)
