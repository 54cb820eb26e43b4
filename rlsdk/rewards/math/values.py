"""Bounded arithmetic for comparing answers: exact where possible, otherwise with 100 digits.

A value is a `Fraction`, an infinity (a `float`), or an mpmath complex number. Slow computations are rejected in
advance, based on the size of their operands.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import Any

Number = Any
"""`Fraction | float | mpmath.mpc`; mpmath has no type annotations."""

MAX_BITS = 20_000
"""Maximum bits of a numerator or denominator."""
MAX_MAGNITUDE = 10_000
"""Maximum logarithm of an inexact value."""
DIGITS = 100
_SAME = 60
"""Digits to which equal inexact values must agree: far more than people write, far fewer than are computed."""
_NOTHING = 80
"""Differences of inexact values below 10 to the power of minus this number count as zero."""
_SMALLEST = 60


class NoValueError(ArithmeticError):
    """The value is undefined (division by zero, a logarithm of zero) or too large to be computed."""


_local = threading.local()


def context() -> Any:
    """Return this thread's mpmath context; its precision is state that threads must not share."""
    if not hasattr(_local, "mp"):
        import mpmath

        _local.mp = mpmath.MPContext()
        _local.mp.dps = DIGITS
    return _local.mp


def inexact(value: Number) -> Any:
    """Convert a value to an mpmath complex number."""
    if isinstance(value, Fraction):
        mp = context()
        return mp.mpc(mp.mpf(value.numerator) / value.denominator)
    if isinstance(value, float):
        raise NoValueError("arithmetic with infinity")
    return value


def add(values: Sequence[Number]) -> Number:
    """Return the sum of the values."""
    return _fold(lambda a, b: a + b, values)


def multiply(values: Sequence[Number]) -> Number:
    """Return the product of the values."""
    product = _fold(lambda a, b: a * b, values)
    if isinstance(product, Fraction) or any(is_zero(value) for value in values):
        return product
    return _not_too_small(product)


def _fold(join: Callable[[Any, Any], Any], values: Sequence[Number]) -> Number:
    total = values[0]
    for value in values[1:]:
        if isinstance(total, Fraction) and isinstance(value, Fraction):
            total = _limited(join(total, value))
        else:
            total = join(inexact(total), inexact(value))
    return total


def _not_too_small(value: Any) -> Any:
    """Reject a nonzero value that would count as zero: only the result of a difference may be that small."""
    if abs(value) < context().mpf(10) ** -_SMALLEST:
        raise NoValueError("a value is too small")
    return value


def divide(a: Number, b: Number) -> Number:
    """Return the quotient `a / b`."""
    if isinstance(a, Fraction) and isinstance(b, Fraction):
        if not b:
            raise NoValueError("division by zero")
        return _limited(a / b)
    below = inexact(b)
    if is_zero(below):
        raise NoValueError("division by zero")
    return inexact(a) / below if is_zero(a) else _not_too_small(inexact(a) / below)


def negate(a: Number) -> Number:
    """Return the negative of a number."""
    return -a


def power(base: Number, exponent: Number) -> Number:
    """Return a power; an odd root of a negative number is the real root, as taught at school."""
    if isinstance(exponent, Fraction) and exponent.denominator == 1 and isinstance(base, Fraction):
        return _whole_power(base, int(exponent))
    if isinstance(base, Fraction) and isinstance(exponent, Fraction):
        return _root_power(base, exponent)
    base, exponent = inexact(base), inexact(exponent)
    if is_zero(base):
        raise NoValueError("a power of zero")
    mp = context()
    return exponential(exponent * mp.log(base))


def _whole_power(base: Fraction, exponent: int) -> Fraction:
    if not base and exponent <= 0:
        raise NoValueError("division by zero, or 0 to the power of 0")
    bits = max(abs(base.numerator).bit_length(), base.denominator.bit_length())
    if base not in (0, 1, -1) and bits * abs(exponent) > MAX_BITS:
        raise NoValueError("a power is too large")
    return Fraction(1 if exponent % 2 == 0 else base) if abs(base) == 1 else base**exponent


def _root_power(base: Fraction, exponent: Fraction) -> Number:
    degree = exponent.denominator
    sign = 1
    if base < 0 and degree % 2:
        base, sign = -base, -1 if exponent.numerator % 2 else 1
    if not base:
        if exponent <= 0:
            raise NoValueError("division by zero")
        return Fraction(0)
    above, below = _exact_root(abs(base.numerator), degree), _exact_root(base.denominator, degree)
    if base > 0 and above is not None and below is not None:
        return sign * _whole_power(Fraction(above, below), exponent.numerator)
    mp = context()
    return sign * exponential(inexact(exponent) * mp.log(inexact(base)))


def _exact_root(value: int, degree: int) -> int | None:
    """Return the root of `value` if it is an integer; otherwise None."""
    if degree == 2:
        root = math.isqrt(value)
    elif degree > value.bit_length() or degree > 64:
        root = 1
    else:
        mp = context()
        root = int(mp.nint(mp.root(mp.mpf(value), degree))) if value.bit_length() < 300 else 1
    return root if root**degree == value else None


def exponential(value: Number) -> Any:
    """Return e to the power of a value."""
    value = inexact(value)
    if abs(value) > MAX_MAGNITUDE:
        raise NoValueError("a power is too large")
    return _not_too_small(context().exp(value))


def logarithm(value: Number) -> Number:
    """Return the natural logarithm."""
    if value == 1:
        return Fraction(0)
    value = inexact(value)
    if is_zero(value):
        raise NoValueError("the logarithm of zero")
    return context().log(value)


def factorial(value: Number) -> Number:
    """Return the factorial of an integer, or the gamma function's value for other numbers."""
    if isinstance(value, Fraction) and value.denominator == 1:
        if not 0 <= value <= 1_500:
            raise NoValueError("the factorial of a number below 0 or above 1500")
        return Fraction(math.factorial(int(value)))
    place: Any = inexact(value) + 1
    if abs(place) > 1_500:
        raise NoValueError("a factorial is too large")
    try:
        return _not_too_small(context().gamma(place))
    except ValueError as error:
        raise NoValueError("a factorial of a negative whole number") from error


def binomial(n: Number, k: Number) -> Number:
    """Return the binomial coefficient."""
    whole = all(isinstance(v, Fraction) and v.denominator == 1 for v in (n, k))
    if whole:
        if not (0 <= n <= 5_000 and 0 <= k <= 5_000):
            raise NoValueError("a binomial coefficient below 0 or above 5000")
        return Fraction(math.comb(int(n), int(k)))
    return divide(factorial(n), multiply([factorial(k), factorial(add([n, negate(k)]))]))


def absolute(value: Number) -> Number:
    """Return the absolute value."""
    return abs(value) if isinstance(value, Fraction) else context().mpc(abs(inexact(value)))


def rounded(down: bool) -> Callable[[Number], Fraction]:
    """Return the function that rounds down, or up."""

    def to_whole(value: Number) -> Fraction:
        if isinstance(value, Fraction):
            return Fraction(math.floor(value) if down else math.ceil(value))
        real = real_part(value)
        if real is None or abs(real) > 10**50:
            raise NoValueError("rounding of a number that is not real or too large")
        mp = context()
        nearest = mp.nint(real)
        if abs(real - nearest) < mp.mpf(10) ** -_SAME:
            return Fraction(int(nearest))
        return Fraction(int(mp.floor(real) if down else mp.ceil(real)))

    return to_whole


def real_part(value: Number) -> Any:
    """Return a finite value as a real number; None if it is not real."""
    if isinstance(value, Fraction | float):
        return value
    mp = context()
    limit = mp.mpf(10) ** -_SAME * max(abs(value), mp.mpf(10) ** -20)
    return value.real if abs(value.imag) <= limit else None


def function(name: str) -> Callable[[Number], Number]:
    """Return an mpmath function by name, restricted to arguments of moderate size."""

    def of(value: Number) -> Number:
        argument = inexact(value)
        if abs(argument) > MAX_MAGNITUDE**2:
            raise NoValueError(f"{name} of a large number")
        if name in {"sinh", "cosh", "tanh"} and abs(argument) > MAX_MAGNITUDE:
            raise NoValueError(f"{name} of a large number")
        try:
            found = context().mpc(getattr(context(), name)(argument))
        except (ValueError, ArithmeticError) as error:
            raise NoValueError(f"{name} is undefined there") from error
        if not context().isfinite(found) or abs(found) > context().mpf(10) ** _NOTHING:  # a pole
            raise NoValueError(f"{name} is undefined there")
        return found

    return of


def is_zero(value: Number) -> bool:
    """Return True if a value is 0 within the computing precision."""
    return bool(value == 0) if isinstance(value, Fraction | float) else abs(value) < context().mpf(10) ** -_NOTHING


def close(a: Number, b: Number, tolerance: float = 0.0) -> bool:
    """Return True if two values are equal, up to a relative difference; rational ones exactly if that is 0."""
    if isinstance(a, float) or isinstance(b, float):  # only infinities are
        return isinstance(a, float) and isinstance(b, float) and a == b
    if isinstance(a, Fraction) and isinstance(b, Fraction):
        return a == b or (tolerance > 0 and abs(a - b) <= Fraction(tolerance) * max(abs(a), abs(b)))
    mp = context()
    x, y = inexact(a), inexact(b)
    return bool(abs(x - y) <= max(mp.mpf(tolerance), mp.mpf(10) ** -_SAME) * max(abs(x), abs(y))) or bool(
        abs(x - y) < mp.mpf(10) ** -_NOTHING
    )


def _limited(value: Fraction) -> Fraction:
    if value.numerator.bit_length() > MAX_BITS or value.denominator.bit_length() > MAX_BITS:
        raise NoValueError("a number is too large")
    return value
