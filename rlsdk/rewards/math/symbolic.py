r"""Parse expressions with further commands, such as `\max`, with math-verify's LaTeX parser.

The parser evaluates while parsing, is slow, and reads unknown commands as products of letters (`\coth x` as cot(hx)).
It is therefore the last resort, for short texts within limits and with known commands. Like any other, its result is
compared by arithmetic.

The limits are checked on the text alone, in linear time. Sympy computes any integers it reads: `9^{9^{9}}` or
`10000000!` would take hours. An answer over these limits is wrong, not invalid: no reference needs that much.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from fractions import Fraction
from functools import reduce
from itertools import accumulate
from typing import Any

from rlsdk.rewards.math import values
from rlsdk.rewards.math.expressions import Expression, apply, constant
from rlsdk.rewards.math.intervals import compare
from rlsdk.rewards.math.latex import FUNCTIONS, GREEK, UnreadableError
from rlsdk.rewards.math.values import Number

MAX_CHARACTERS = 200
MAX_NESTING = 8
"""Maximum nesting of brackets: LaTeX's grammar is ambiguous, and a parser tries all readings."""
MAX_BARS = 8
"""Maximum number of absolute value bars, each of which may open or close."""
MAX_DIGITS = 50
"""Maximum digits of a number."""
MAX_EXPONENT = 1_000
"""Product of all exponents of an answer, since a power of a power multiplies them."""
MAX_SYMBOLIC_EXPONENT = 100
"""The same limit with letters: polynomials are compared by their terms."""
MAX_GROUP_EXPONENT = 20
"""The same limit with letters and powers of brackets, which are expanded."""
MAX_FACTORIAL = 100

_DIGITS = re.compile(r"[0-9]+")
_COSTLY = re.compile(
    r"\\(?:sum|prod|int|iint|iiint|oint|lim|limsup|liminf|binom|dbinom|tbinom|choose|uparrow|mod|bmod|gcd|lcm)(?![a-z])"
)
_POWER = re.compile(r"\*\*|\^")
_LETTER = re.compile(r"(?<![\\A-Za-z])[A-Za-z]")
"""A letter that is not part of a command's name."""
_GROUP_POWER = re.compile(r"[)\]}]\s*(?:\*\*|\^)")
_FACTORIAL = re.compile(r"(.?[0-9]{0,9})\s*!(!?)")
_OPENING, _CLOSING = "([{", ")]}"

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
    """Return the expression parsed by math-verify."""
    too_much = over_limits(text)
    word = _WORD.search(text)
    if too_much or word:
        raise UnreadableError(too_much or f"unsupported {word and word[0]!r} in an expression")
    unknown = set(re.findall(r"\\([A-Za-z]+)", text)) - _COMMANDS - _OTHERS
    depths = list(accumulate((character == "{") - (character == "}") for character in text))
    if unknown or r"\\" in text or min(depths) < 0 or depths[-1]:
        raise UnreadableError(f"unknown commands or unbalanced braces: {', '.join(sorted(unknown))[:40]}")
    return _converted(_parsed(text))


def _parsed(text: str) -> Any:
    from latex2sympy2_extended.latex2sympy2 import latex2sympy

    try:
        # Without the fraction, the parser would return the part before a syntax error as if it were the whole.
        return latex2sympy(rf"\frac{{{text}}}{{1}}", is_real=True, convert_degrees=False, normalization_config=None)
    except Exception as error:  # the parser and sympy may raise anything
        raise UnreadableError(f"math-verify cannot parse it: {type(error).__name__}") from error


def _converted(tree: Any) -> Expression:
    """Convert sympy's tree into an expression."""
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
        sign = 1 if name == "Max" else -1
        return apply(lambda *of: reduce(lambda a, b: a if compare(a, b) == sign else b, of), *operands)
    if name in _FUNCTIONS and len(operands) == 1 + (name == "binomial"):
        return apply(_FUNCTIONS[name], *operands)
    raise UnreadableError(f"{name} is not supported")


def over_limits(text: str) -> str:
    """Return why a text would be too costly for a computer algebra system; empty if it is within the limits."""
    if len(text) > MAX_CHARACTERS:
        return f"it has {len(text)} characters, more than {MAX_CHARACTERS}"
    if _nesting(text) > MAX_NESTING:
        return f"its brackets are nested more than {MAX_NESTING} levels deep"
    if text.count("|") + text.count(r"\vert") > MAX_BARS:
        return f"it has more than {MAX_BARS} bars"
    if any(len(digits) > MAX_DIGITS for digits in _DIGITS.findall(text)):
        return f"it contains a number with more than {MAX_DIGITS} digits"
    costly = _COSTLY.search(text)
    if costly:
        return f"{costly[0]} may take too long to compute"
    if not all(_small_factorial(*match.groups()) for match in _FACTORIAL.finditer(text)):
        return f"it contains a factorial of a computed value, or above {MAX_FACTORIAL}!"
    return _exponents_fault(text)


def _nesting(text: str) -> int:
    depth = deepest = 0
    for character in text:
        if character in _OPENING:
            depth += 1
            deepest = max(deepest, depth)
        elif character in _CLOSING:
            depth -= 1
    return deepest


def _small_factorial(operand: str, second: str) -> bool:
    """Return True if `operand!` is the factorial of a letter or a small number, not of a computed value."""
    if second:
        return False
    digits = operand.lstrip("0123456789")
    number = operand[len(digits) :] if not digits else operand[1:]
    if number:
        return int(number) <= MAX_FACTORIAL
    return digits.isalpha()


def _exponents_fault(text: str) -> str:
    total = 1
    for power in _POWER.finditer(text):
        exponent = _operand(text, power.end())
        inner = _POWER.search(exponent)
        if "!" in exponent or (inner and not exponent[: inner.start()].rstrip()[-1:].isalpha()):
            return "a number is raised to a computed power"
        for digits in _DIGITS.findall(exponent):  # sums and products in an exponent are bounded by these products
            total *= int(digits) + 1 if int(digits) > 2 else max(int(digits), 1)
    most = MAX_EXPONENT
    if _LETTER.search(text):
        most = MAX_GROUP_EXPONENT if _GROUP_POWER.search(text) else MAX_SYMBOLIC_EXPONENT
    return f"its exponents multiply to more than {most}" if total > most else ""


def _operand(text: str, start: int) -> str:
    """Return the exponent after a power sign: a bracketed group, or everything up to a space or an operator."""
    start += len(text[start:]) - len(text[start:].lstrip())
    if text[start : start + 1] not in tuple(_OPENING):
        found = re.match(r"[-+]?[^\s,;=+*/)\]}-]*", text[start:])
        return found[0] if found else ""
    depth = 0
    for end in range(start, len(text)):
        depth += (text[end] in _OPENING) - (text[end] in _CLOSING)
        if depth == 0:
            return text[start + 1 : end]
    return text[start + 1 :]
