r"""Expressions with commands that are not known here (`\max`), read by math-verify's parser of LaTeX.

It evaluates while it reads, is slow, and reads what it does not know as products of letters (`\coth x` as cot(hx)).
Hence it is asked last, for short texts within `rlsdk.rewards.math.bounds` and commands that it knows. What it finds is
compared like everything else, by arithmetic.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from fractions import Fraction
from functools import partial, reduce
from itertools import accumulate
from typing import Any

from rlsdk.rewards.math import values
from rlsdk.rewards.math.bounds import over_limits
from rlsdk.rewards.math.expressions import Expression, apply, constant
from rlsdk.rewards.math.intervals import compare
from rlsdk.rewards.math.latex import FUNCTIONS, GREEK, UnreadableError
from rlsdk.rewards.math.values import Number

_COMMANDS = frozenset({"max", "min", "arcsinh", "arccosh", "arctanh"}) | FUNCTIONS | GREEK
_OTHERS = frozenset({"cdot", "times", "left", "right"})
_WORD = re.compile(r"(?<![\\A-Za-z])[A-Za-z]{2,}|\\(?:text|mbox)|[^\x20-\x7e]|[%$;=<>]")
_CONSTANTS: dict[str, Callable[[], Number]] = {
    "Pi": lambda: values.inexact(Fraction(1)) * values.context().pi,
    "Exp1": lambda: values.exponential(Fraction(1)),
}
_FUNCTIONS: dict[str, Callable[..., Number]] = {
    **{name: values.function(name) for name in ("sin", "cos", "tan", "cot", "sec", "csc", "sinh", "cosh", "tanh")},
    **{name: values.function(name) for name in ("asin", "acos", "atan", "asinh", "acosh", "atanh", "coth", "sech")},
    "exp": values.exponential,
    "log": values.logarithm,
    "factorial": values.factorial,
    "binomial": values.binomial,
    "Abs": values.absolute,
    "floor": values.rounded(down=True),
    "ceiling": values.rounded(down=False),
}


def read_by_algebra(text: str) -> Expression:
    """The expression that math-verify's parser reads.

    Args:
        text: LaTeX.

    Raises:
        UnreadableError: It is over the limits, or no single expression with a value.
    """
    too_much = over_limits(text)
    word = _WORD.search(text)
    if too_much or word:
        raise UnreadableError(too_much or f"{word and word[0]!r} belongs to no expression that is known")
    unknown = set(re.findall(r"\\([A-Za-z]+)", text)) - _COMMANDS - _OTHERS
    depths = list(accumulate((character == "{") - (character == "}") for character in text))
    if unknown or r"\\" in text or min(depths) < 0 or depths[-1]:
        raise UnreadableError(f"commands are not known, or braces not balanced: {', '.join(sorted(unknown))[:40]}")
    return _converted(_parsed(text))


def _parsed(text: str) -> Any:
    from latex2sympy2_extended.latex2sympy2 import latex2sympy

    try:
        # The fraction: of a text that goes wrong somewhere, its grammar takes the part before for the whole.
        return latex2sympy(rf"\frac{{{text}}}{{1}}", is_real=True, convert_degrees=False, normalization_config=None)
    except Exception as error:  # its parser and sympy raise anything
        raise UnreadableError(f"math-verify cannot read it: {type(error).__name__}") from error


def _converted(tree: Any) -> Expression:
    """Sympy's tree as an expression."""
    name = type(tree).__name__
    if getattr(tree, "is_Rational", False):
        return constant(Fraction(int(tree.p), int(tree.q)))
    if getattr(tree, "is_Symbol", False):
        return Expression(frozenset({tree.name}), lambda at: at[tree.name])
    if name in _CONSTANTS:
        return apply(_CONSTANTS[name])
    operands = [_converted(argument) for argument in getattr(tree, "args", ())]
    if name == "Add":
        return apply(lambda *all_: values.add(all_), *operands)
    if name == "Mul":
        return apply(lambda *all_: values.multiply(all_), *operands)
    if name == "Pow":
        return apply(values.power, *operands)
    if name in {"Max", "Min"}:
        return apply(partial(_extreme, 1 if name == "Max" else -1), *operands)
    if name in _FUNCTIONS and len(operands) == 1 + (name == "binomial"):
        return apply(_FUNCTIONS[name], *operands)
    raise UnreadableError(f"{name} has no value that is computed here")


def _extreme(sign: int, *of: Number) -> Number:
    return reduce(lambda a, b: a if compare(a, b) == sign else b, of)
