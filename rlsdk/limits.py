"""Limits of numeric options, written into their types.

    def soft_clip(x, *, temperature: Annotated[float, rlsdk.above(0)] = 0.3): ...

A value outside is a fault of the config, found before anything starts; `rlsdk plugins` shows the limits with the type.
Numbers must be finite, except where a limit names infinity: `Annotated[float, rlsdk.at_most(math.inf)]`.
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
    """One side of a range; stands in `Annotated[float, …]`."""

    sign: Sign
    number: float

    def admits(self, value: Any) -> bool:
        """Return True if `value` is not a number or lies within the limit; NaN never does."""
        return isinstance(value, bool) or not isinstance(value, int | float) or _COMPARE[self.sign](value, self.number)


def at_least(number: float) -> Limit:
    """Limit an option to numbers from `number` on: `Annotated[float, rlsdk.at_least(0)]`."""
    return Limit(">=", number)


def above(number: float) -> Limit:
    """Limit an option to numbers greater than `number`."""
    return Limit(">", number)


def at_most(number: float) -> Limit:
    """Limit an option to numbers up to `number`; beside `at_least` it makes a range."""
    return Limit("<=", number)


def below(number: float) -> Limit:
    """Limit an option to numbers less than `number`."""
    return Limit("<", number)


NonNegative = Annotated[float, at_least(0)]
Positive = Annotated[float, above(0)]
Share = Annotated[float, at_least(0), at_most(1)]
Count = Annotated[int, at_least(1)]
"""A whole number of things, at least one."""


def written(kind: str, limits: tuple[Limit, ...]) -> str:
    """A type with its limits as a person writes them: `float >= 0 and <= 1`."""
    return " ".join([kind, " and ".join(f"{limit.sign} {limit.number:g}" for limit in limits)]).rstrip()
