"""Random arithmetic over given numbers, with its value."""

from __future__ import annotations

from fractions import Fraction
from random import Random

Value = int | Fraction
Drawn = tuple[Value, str]
"""The value of an expression, and its text; every operation but the outermost is in brackets."""


def pick(random: Random, count: int) -> int:
    """An index below `count`, by the one method that gives the same for a seed in every version of Python."""
    return int(random.random() * count)


def draw(random: Random, numbers: tuple[int, ...], operators: str, *, natural: bool) -> Drawn | None:
    """Join all numbers by random operations: a random two of what is left become one, until one is left.

    Args:
        random: The source of chance.
        numbers: Each is used once.
        operators: Some of `+-*/`.
        natural: Only values that are whole numbers from 0 upwards, in between too.

    Returns:
        None if no operator is possible between two values.
    """
    left: list[Drawn] = [(number, str(number)) for number in numbers]
    while len(left) > 1:
        first = left.pop(pick(random, len(left)))
        second = left.pop(pick(random, len(left)))
        joined = _join(random, first, second, operators, natural)
        if joined is None:
            return None
        left.append((joined[0], f"({joined[1]})" if left else joined[1]))
    return left[0]


def _join(random: Random, first: Drawn, second: Drawn, operators: str, natural: bool) -> Drawn | None:
    """Apply one of the possible operators, each as likely; values change places where only that makes it possible."""
    a, b = first[0], second[0]
    if "/" in operators and not (_divides(b, a, natural) or _divides(a, b, natural)):
        operators = operators.replace("/", "")
    if not operators:
        return None
    operator = operators[pick(random, len(operators))]
    if (operator == "-" and natural and a < b) or (operator == "/" and not _divides(b, a, natural)):
        return _compute(operator, b, a), f"{second[1]}{operator}{first[1]}"
    return _compute(operator, a, b), f"{first[1]}{operator}{second[1]}"


def _divides(divisor: Value, value: Value, natural: bool) -> bool:
    return divisor != 0 and (not natural or value % divisor == 0)


def _compute(operator: str, a: Value, b: Value) -> Value:
    if operator == "+":
        return a + b
    if operator == "-":
        return a - b
    if operator == "*":
        return a * b
    return a // b if type(a) is type(b) is int and a % b == 0 else Fraction(a) / b
