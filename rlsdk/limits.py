"""Limits of numeric options, part of their type annotations.

    def soft_clip(x, *, temperature: Annotated[float, rlsdk.above(0)] = 0.3): ...

A value outside the limits is a config fault, reported before anything starts; `rlsdk plugins` shows the limits with the
type. Numbers must be finite, unless a limit names infinity: `Annotated[float, rlsdk.at_most(math.inf)]`.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from typing import Annotated, Any, Literal

import attrs

__all__ = [
    "Count",
    "Limit",
    "NonNegative",
    "Positive",
    "Share",
    "above",
    "at_least",
    "at_most",
    "below",
]
Sign = Literal[">=", ">", "<=", "<"]
_COMPARE: Mapping[Sign, Callable[[float, float], bool]] = {
    ">=": operator.ge,
    ">": operator.gt,
    "<=": operator.le,
    "<": operator.lt,
}


@attrs.frozen
class Limit:
    """One side of a range, for use in `Annotated[float, …]`."""

    sign: Sign
    number: float

    def admits(self, value: Any) -> bool:
        """Return True if `value` is not a number or lies within the limit; NaN never does."""
        return isinstance(value, bool) or not isinstance(value, int | float) or _COMPARE[self.sign](value, self.number)


def at_least(number: float) -> Limit:
    """Limit an option to numbers >= `number`: `Annotated[float, rlsdk.at_least(0)]`."""
    return Limit(">=", number)


def above(number: float) -> Limit:
    """Limit an option to numbers > `number`."""
    return Limit(">", number)


def at_most(number: float) -> Limit:
    """Limit an option to numbers <= `number`; together with `at_least`, it makes a range."""
    return Limit("<=", number)


def below(number: float) -> Limit:
    """Limit an option to numbers < `number`."""
    return Limit("<", number)


NonNegative = Annotated[float, at_least(0)]
Positive = Annotated[float, above(0)]
Share = Annotated[float, at_least(0), at_most(1)]
Count = Annotated[int, at_least(1)]
"""An integer of at least one."""


def written(kind: str, limits: tuple[Limit, ...]) -> str:
    """Return a type with its limits in readable form: `float >= 0 and <= 1`."""
    return " ".join([kind, " and ".join(f"{limit.sign} {limit.number:g}" for limit in limits)]).rstrip()
