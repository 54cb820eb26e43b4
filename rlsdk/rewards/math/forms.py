"""Forms of answers: a value with its unit, a list, a tuple, a set, an interval, a matrix, an equation, words."""

from __future__ import annotations

from fractions import Fraction

import attrs

from rlsdk.rewards.math import intervals, values
from rlsdk.rewards.math.expressions import Expression
from rlsdk.rewards.math.intervals import Interval
from rlsdk.rewards.math.units import Unit


@attrs.frozen
class Value:
    r"""An expression or an infinity, possibly with a unit.

    Attributes:
        expression: Expression without the unit.
        unit: Unit; None if there is none.
        with_unit: The same value with its last letter read as a unit instead of a variable (`5 m`).
        percent: Number before the percent sign, since `50\%` may be meant as 50.
    """

    expression: Expression
    unit: Unit | None = None
    with_unit: Value | None = None
    percent: Expression | None = None


@attrs.frozen
class Words:
    """Text that is compared word for word."""

    text: str


@attrs.frozen
class Listing:
    """Several answers in any order: `1, 2`, `{1, 2}`, `± 1`."""

    items: tuple[Form, ...]
    is_set: bool = False


@attrs.frozen
class Ordered:
    """A tuple, a point or an interval with its brackets, or a ratio (`:`)."""

    opening: str
    items: tuple[Form, ...]
    closing: str


@attrs.frozen
class Matrix:
    """Rows of forms, all of the same length."""

    rows: tuple[tuple[Form, ...], ...]


@attrs.frozen
class RealSet:
    """A union of intervals; `variable` is set if it comes from an inequality."""

    intervals: tuple[Interval, ...]
    variable: str | None = None


@attrs.frozen
class Relation:
    """`difference SIGN 0`, an equation or inequality.

    Attributes:
        difference: Left minus right side.
        sign: One of `=`, `!=`, `<` and `<=`.
        name: Left side of an assignment, such as `x` or `f(x)`.
        assigned: Assigned value.
    """

    difference: Expression | None
    sign: str
    name: str = ""
    assigned: Form | None = None


@attrs.frozen
class Based:
    """An integer with the base it is written in."""

    value: int
    base: int


Form = Value | Words | Listing | Ordered | Matrix | RealSet | Relation | Based


def as_set(form: Form) -> RealSet | None:
    """Return a form as a set of real numbers; None if it is not one."""
    if isinstance(form, RealSet):
        return form
    if isinstance(form, Listing) and form.is_set:
        numbers = [real_value(item) for item in form.items]
        if any(number is None or isinstance(number, float) for number in numbers):
            return None
        return RealSet(intervals.union(Interval(number, number, True, True) for number in numbers))
    if isinstance(form, Ordered) and form.opening in {"(", "["} and form.closing in {")", "]"} and len(form.items) == 2:
        low, high = (real_value(item) for item in form.items)
        interval = (
            None if low is None or high is None else Interval(low, high, form.opening == "[", form.closing == "]")
        )
        if interval is None or interval.empty or intervals.compare(low, high) == 0:
            return None
        if (interval.low_in and isinstance(low, float)) or (interval.high_in and isinstance(high, float)):
            return None
        return RealSet((interval,))
    return None


def real_value(form: Form) -> values.Number | None:
    """Return the value of a form that is a real number or infinity, without a unit; else None."""
    if not isinstance(form, Value) or form.unit is not None or form.expression.symbols:
        return None
    try:
        value = form.expression.compute({})
        return value if isinstance(value, Fraction | float) or values.real_part(value) is not None else None
    except values.NoValueError:
        return None
