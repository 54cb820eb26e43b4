"""Whether two parsed expressions have the same value, by arithmetic instead of simplification.

Simplifying what a model wrote may take for ever; computing it takes as long as it is. Rational values are exact; with
variables, expressions are compared at a few points, exactly where they are rational there.
"""

from __future__ import annotations

import cmath
import math
from collections.abc import Callable, Mapping, Sequence
from fractions import Fraction
from random import Random
from typing import Any

Number = Fraction | complex

_POINTS = 4
_LARGEST_EXPONENT = 2_000
_CONSTANTS = {"Pi": math.pi, "Exp1": math.e, "ImaginaryUnit": 1j, "GoldenRatio": (1 + math.sqrt(5)) / 2}
_FUNCTIONS: dict[str, Callable[[complex], complex]] = {
    **{
        name: getattr(cmath, name)
        for name in ("sin", "cos", "tan", "sinh", "cosh", "tanh", "asin", "acos", "atan", "exp")
    },
    "cot": lambda z: 1 / cmath.tan(z),
    "sec": lambda z: 1 / cmath.cos(z),
    "csc": lambda z: 1 / cmath.sin(z),
    "Abs": abs,
}


class IncomparableError(Exception):
    """No value can be computed: another kind of object, or one that has no value."""


def equal(reference: Any, answer: Any, tolerance: float) -> bool | None:
    """Whether two objects of sympy are equal.

    Args:
        reference: A number, an expression, or a set, tuple, interval or matrix of such.
        answer: The same.
        tolerance: Relative difference that is taken for rounding; 0 compares rational values exactly.

    Returns:
        None where this cannot tell.
    """
    for parts in (_matrix, _interval, _tuple):
        first, second = parts(reference), parts(answer)
        if first is not None and second is not None:
            return _all_equal(first, second, tolerance)
    first, second = _finite_set(reference), _finite_set(answer)
    if first is not None and second is not None:
        return _same_members(first, second, tolerance)
    if not (_is_scalar(reference) and _is_scalar(answer)):
        return None
    return _same_value(reference, answer, tolerance)


def _is_scalar(value: Any) -> bool:
    return bool(getattr(value, "is_Number", False)) or (
        hasattr(value, "is_commutative") and _kind(value) == "NumberKind"
    )


def _kind(value: Any) -> str:
    return str(getattr(value, "kind", ""))


def _matrix(value: Any) -> list[Any] | None:
    return [*value.shape, *value.flat()] if getattr(value, "is_Matrix", False) and hasattr(value, "flat") else None


def _interval(value: Any) -> list[Any] | None:
    import sympy

    if not isinstance(value, sympy.Interval):
        return None
    return [sympy.Integer(bool(value.left_open)), sympy.Integer(bool(value.right_open)), value.start, value.end]


def _tuple(value: Any) -> list[Any] | None:
    import sympy

    return list(value.args) if isinstance(value, sympy.Tuple) else None


def _finite_set(value: Any) -> list[Any] | None:
    import sympy

    return list(value.args) if isinstance(value, sympy.FiniteSet) else None


def _all_equal(first: Sequence[Any], second: Sequence[Any], tolerance: float) -> bool | None:
    if len(first) != len(second):
        return False
    found = [True if a == b else equal(a, b, tolerance) for a, b in zip(first, second, strict=True)]
    return False if False in found else None if None in found else True


def _same_members(first: Sequence[Any], second: Sequence[Any], tolerance: float) -> bool | None:
    left = list(second)
    for a in first:
        match = next((index for index, b in enumerate(left) if a == b or equal(a, b, tolerance)), None)
        if match is None:
            return None if any(equal(a, b, tolerance) is None for b in left) else False
        left.pop(match)
    return not left


def _same_value(first: Any, second: Any, tolerance: float) -> bool | None:
    names = sorted({symbol.name for symbol in first.free_symbols | second.free_symbols})
    compared = 0
    for point in range(_POINTS if names else 1):
        at = _point(names, point)
        try:
            if not _close(compute(first, at), compute(second, at), tolerance):
                return False
            compared += 1
        except (IncomparableError, ArithmeticError, ValueError, TypeError, AttributeError):
            continue  # the function has no value here; the other points tell
    return True if compared >= min(2, len(names) + 1) else None


def _point(names: Sequence[str], index: int) -> Mapping[str, Fraction]:
    """Values of the variables; the last point is negative, where roots and absolute values differ."""
    random = Random(index)
    sign = -1 if index == _POINTS - 1 else 1
    return {name: sign * Fraction(1 + int(random.random() * 96), 31) for name in names}


def _close(a: Number, b: Number, tolerance: float) -> bool:
    if isinstance(a, Fraction) and isinstance(b, Fraction):
        return a == b or abs(a - b) <= Fraction(tolerance) * abs(a)
    x, y = complex(a), complex(b)
    return abs(x - y) <= max(tolerance, 1e-9) * max(abs(x), abs(y)) + 1e-12


def compute(expression: Any, at: Mapping[str, Fraction]) -> Number:
    """The value of an expression of sympy.

    Args:
        expression: Its tree.
        at: Values of its variables.

    Raises:
        IncomparableError: It holds something that has no value.
    """
    if expression.is_Rational:
        return Fraction(int(expression.p), int(expression.q))
    if expression.is_Float:
        return Fraction(float(expression))
    if expression.is_Symbol:
        return at[expression.name]
    name = type(expression).__name__
    if name in _CONSTANTS:
        return complex(_CONSTANTS[name])
    values = [compute(argument, at) for argument in expression.args]
    if expression.is_Add:
        return _fold(lambda a, b: a + b, values)
    if expression.is_Mul:
        return _fold(lambda a, b: a * b, values)
    if expression.is_Pow:
        return _power(*values)
    return _function(name, values)


def _fold(join: Callable[[Any, Any], Any], values: Sequence[Number]) -> Number:
    total: Number = values[0]
    for value in values[1:]:
        exact = isinstance(total, Fraction) and isinstance(value, Fraction)
        total = join(total, value) if exact else join(complex(total), complex(value))
    return total


def _power(base: Number, exponent: Number) -> Number:
    if isinstance(base, Fraction) and isinstance(exponent, Fraction) and exponent.denominator == 1:
        if abs(exponent) > _LARGEST_EXPONENT:
            raise IncomparableError(f"the exponent {exponent} is too large")
        return base ** int(exponent)
    return complex(base) ** complex(exponent)


def _function(name: str, values: Sequence[Number]) -> Number:
    first = values[0] if values else None
    if name == "log" and values:
        return _fold(lambda a, b: a / b, [cmath.log(complex(value)) for value in values])
    if name == "factorial" and isinstance(first, Fraction) and first.denominator == 1 and 0 <= first <= 1_000:
        return Fraction(math.factorial(int(first)))
    if name in {"floor", "ceiling"} and isinstance(first, Fraction):
        return Fraction(math.floor(first) if name == "floor" else math.ceil(first))
    if name == "Abs" and isinstance(first, Fraction):
        return abs(first)
    if name in _FUNCTIONS and first is not None and len(values) == 1:
        return complex(_FUNCTIONS[name](complex(first)))
    raise IncomparableError(f"{name} has no value here")
