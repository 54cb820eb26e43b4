"""Compare two answers by arithmetic: exactly for rational values, otherwise to 60 digits.

Expressions with variables are compared at points derived from both texts. Nothing is simplified: simplifying a
model's expression may take forever, while the time to evaluate it is bounded.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from fractions import Fraction
from random import Random

from rlsdk.rewards.math import intervals, values
from rlsdk.rewards.math.expressions import LOGARITHM_BASE, Expression, Point
from rlsdk.rewards.math.forms import Based, Form, Listing, Matrix, Ordered, RealSet, Relation, Value, Words, as_set
from rlsdk.rewards.math.values import Number

_POINTS = 16
_ENOUGH = 5
"""Minimum number of points where both expressions must have a value."""


def equal(first: Form, second: Form, *, seed: str = "", tolerance: float = 0.0) -> bool:
    """Return True if two answers are equal; the comparison is symmetric.

    Args:
        first: First answer.
        second: Second answer.
        seed: Seed of the points at which expressions with variables are compared.
        tolerance: Maximum relative difference of two equal values, to allow for rounding.
    """
    try:
        return _Comparison(seed, tolerance).equal(first, second)
    except (values.NoValueError, OverflowError, RecursionError):
        return False


def rational(form: Form) -> Fraction | None:
    """Return the value of an answer that is a rational number, however it was written; None for any other answer.

    An assignment such as `x = 3` is its value. Numbers with a unit or a percent sign have none, since what they equal
    depends on the other answer.
    """
    value = form.assigned if isinstance(form, Relation) else form
    if not isinstance(value, Value) or value.unit is not None or value.percent is not None:
        return None
    found = None if value.expression.symbols else _at(value.expression, {})
    return found if isinstance(found, Fraction) else None


class _Comparison:
    def __init__(self, seed: str, tolerance: float) -> None:
        self.seed, self.tolerance = seed, tolerance

    def equal(self, a: Form, b: Form) -> bool:
        if isinstance(a, Relation) or isinstance(b, Relation):
            return self._relations(a, b)
        if isinstance(a, RealSet) or isinstance(b, RealSet):
            return self._sets(a, b)
        if type(a) is not type(b):
            return isinstance(a, Words | Value) and isinstance(b, Words | Value) and _letter(a) == _letter(b) != ""
        if isinstance(a, Value) and isinstance(b, Value):
            return self._values(a, b)
        if isinstance(a, Listing) and isinstance(b, Listing):
            return self._any_order(a, b)
        if isinstance(a, Matrix) and isinstance(b, Matrix):
            return len(a.rows) == len(b.rows) and all(map(self._in_order, a.rows, b.rows))
        if isinstance(a, Ordered) and isinstance(b, Ordered):
            return (a.opening, a.closing) == (b.opening, b.closing) and self._in_order(a.items, b.items)
        return isinstance(a, Words | Based) and a == b

    def _in_order(self, first: Sequence[Form], second: Sequence[Form]) -> bool:
        return len(first) == len(second) and all(self.equal(x, y) for x, y in zip(first, second, strict=True))

    def _any_order(self, first: Listing, second: Listing) -> bool:
        given = [self._different(each.items) if each.is_set else list(each.items) for each in (first, second)]
        if len(given[0]) != len(given[1]):
            return False
        left = given[1]
        for item in given[0]:
            match = next((index for index, other in enumerate(left) if self.equal(item, other)), None)
            if match is None:
                return False
            left.pop(match)
        return True

    def _different(self, items: Sequence[Form]) -> list[Form]:
        found: list[Form] = []
        for item in items:
            if not any(self.equal(item, other) for other in found):
                found.append(item)
        return found

    def _sets(self, a: Form, b: Form) -> bool:
        first, second = as_set(a), as_set(b)
        if first is None or second is None:
            return False
        if None not in (first.variable, second.variable) and first.variable != second.variable:
            return False
        return intervals.same(first.intervals, second.intervals)

    def _relations(self, a: Form, b: Form) -> bool:
        if not isinstance(a, Relation):
            a, b = b, a
        if not isinstance(a, Relation):
            return False
        if not isinstance(b, Relation):
            return a.assigned is not None and not isinstance(b, RealSet) and self.equal(a.assigned, b)
        if (
            a.assigned is not None
            and b.assigned is not None
            and a.name == b.name
            and self.equal(a.assigned, b.assigned)
        ):
            return True
        if a.difference is None or b.difference is None or a.sign != b.sign:
            return False
        if not (a.difference.symbols or b.difference.symbols):  # any two numbers are proportional, so compare them
            left, right = _at(a.difference, {}), _at(b.difference, {})
            return None not in (left, right) and values.close(left, right)
        return self._proportional(a.difference, b.difference, signed=a.sign not in {"=", "!="})

    def _proportional(self, first: Expression, second: Expression, *, signed: bool) -> bool:
        """Return True if one is a constant multiple of the other (positive if `signed`), hence equivalent."""
        if first.symbols != second.symbols:
            return False
        ratio: Number = None
        compared = 0
        for point in self._points(first.symbols):
            found = [_at(expression, point) for expression in (first, second)]
            if None in found or any(values.is_zero(value) for value in found):
                if found.count(None) == 1 or (None not in found and not all(map(values.is_zero, found))):
                    return False
                continue
            quotient = values.divide(found[0], found[1])
            if ratio is not None and not values.close(ratio, quotient):
                return False
            ratio = quotient
            compared += 1
        positive = ratio is not None and (values.real_part(ratio) or 0) > 0
        return compared >= _ENOUGH and (positive or not signed)

    def _values(self, a: Value, b: Value) -> bool:
        if (a.percent is None) != (b.percent is None) and a.unit is None and b.unit is None:
            return self._percentage(a, b) if a.percent is not None else self._percentage(b, a)
        if (a.unit is None) != (b.unit is None):  # `5 m` is five metres if compared with a unit, else a product
            a, b = ((each.with_unit or each) if each.unit is None else each for each in (a, b))
        factors = (Fraction(1), Fraction(1))
        if a.unit is not None and b.unit is not None:
            if a.unit.powers != b.unit.powers:
                return False
            factors = (a.unit.factor, b.unit.factor)
        return self._expressions(a.expression, b.expression, factors)

    def _percentage(self, a: Value, b: Value) -> bool:
        """Return True if a percentage equals a plain value, read as hundredths or as the number before the sign."""
        readings = [each for each in (a.expression, a.percent) if each is not None]
        return any(self._expressions(each, b.expression, (Fraction(1), Fraction(1))) for each in readings)

    def _expressions(self, first: Expression, second: Expression, factors: tuple[Fraction, Fraction]) -> bool:
        names = first.symbols | second.symbols
        if not names:
            x, y = first.compute({}), second.compute({})
            return self._close(x, y, factors)
        complex_ = first.imaginary or second.imaginary
        compared = 0
        for point in self._points(names):
            x, y = _at(first, point, complex_), _at(second, point, complex_)
            if x is None and y is None:
                continue
            if x is None or y is None or not self._close(x, y, factors):
                return False
            compared += 1
        return compared >= _ENOUGH

    def _close(self, x: Number, y: Number, factors: tuple[Fraction, Fraction]) -> bool:
        if factors[0] != factors[1]:
            x, y = values.multiply([x, factors[0]]), values.multiply([y, factors[1]])
        return values.close(x, y, self.tolerance)

    def _points(self, names: frozenset[str]) -> Iterator[Point]:
        """Yield values for the variables, in several magnitudes and both signs; unpredictable without both texts."""
        random = Random(self.seed)
        for index in range(_POINTS):
            largest, signs = (1, 4, 30, 4)[index % 4], ((1,), (1, -1), (1,), (-1,))[index % 4]
            yield {name: self._number(random, name, largest, signs) for name in sorted(names)}

    def _number(self, random: Random, name: str, largest: int, signs: Sequence[int]) -> Fraction:
        value = Fraction(random.randrange(1, 997 * largest), 997)
        return value + 2 if name == LOGARITHM_BASE else random.choice(signs) * value


def _letter(form: Words | Value) -> str:
    """Return the letter if a form is a single letter; otherwise empty."""
    if isinstance(form, Words):
        return form.text if len(form.text) == 1 else ""
    if form.unit is not None or len(form.expression.symbols) != 1:
        return ""
    (name,) = form.expression.symbols
    points = [Fraction(2), Fraction(7, 3), Fraction(-5)]
    is_letter = len(name) == 1 and all(_at(form.expression, {name: point}) == point for point in points)
    return name.lower() if is_letter else ""


def _at(expression: Expression, point: Point, complex_: bool = False) -> Number | None:
    """Return the value at a point; None if it is undefined, or not real unless `complex_`."""
    try:
        value = expression.compute(point)
    except (values.NoValueError, OverflowError, ZeroDivisionError):
        return None
    return value if complex_ or values.real_part(value) is not None else None
