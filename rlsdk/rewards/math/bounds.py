"""Limits on input to the computer algebra system, checked on the text alone and in linear time.

Sympy computes whatever integers it reads: `9^{9^{9}}` or `10000000!` would hold it for hours. An answer over these
limits is wrong, not invalid: no reference needs as much.
"""

from __future__ import annotations

import re

MAX_CHARACTERS = 200
MAX_NESTING = 8
"""Of brackets: the grammar of LaTeX is ambiguous, and a parser tries what may be."""
MAX_BARS = 8
"""Of absolute values, each of which may open or close one."""
MAX_DIGITS = 50
"""Of one number."""
MAX_EXPONENT = 1_000
"""Product of all exponents of an answer, since a power of a power multiplies them."""
MAX_SYMBOLIC_EXPONENT = 100
"""The same where letters occur: polynomials are compared by their terms."""
MAX_GROUP_EXPONENT = 20
"""The same where letters and a power of a bracket occur: such a power is expanded."""
MAX_FACTORIAL = 100

_DIGITS = re.compile(r"[0-9]+")
_COSTLY = re.compile(
    r"\\(?:sum|prod|int|iint|iiint|oint|lim|limsup|liminf|binom|dbinom|tbinom|choose|uparrow|mod|bmod|gcd|lcm)(?![a-z])"
)
_POWER = re.compile(r"\*\*|\^")
_LETTER = re.compile(r"(?<![\\A-Za-z])[A-Za-z]")
"""That is no part of a command's name."""
_GROUP_POWER = re.compile(r"[)\]}]\s*(?:\*\*|\^)")
_FACTORIAL = re.compile(r"(.?[0-9]{0,9})\s*!(!?)")
_OPENING, _CLOSING = "([{", ")]}"


def over_limits(text: str) -> str:
    """Why a text is too much for a computer algebra system; empty if it is not."""
    if len(text) > MAX_CHARACTERS:
        return f"it has {len(text)} characters, more than {MAX_CHARACTERS}"
    if _nesting(text) > MAX_NESTING:
        return f"its brackets are nested deeper than {MAX_NESTING}"
    if text.count("|") + text.count(r"\vert") > MAX_BARS:
        return f"it has more than {MAX_BARS} bars"
    if any(len(digits) > MAX_DIGITS for digits in _DIGITS.findall(text)):
        return f"it holds a number of more than {MAX_DIGITS} digits"
    costly = _COSTLY.search(text)
    if costly:
        return f"{costly[0]} would have to be computed"
    if not all(_small_factorial(*match.groups()) for match in _FACTORIAL.finditer(text)):
        return f"it holds a factorial above {MAX_FACTORIAL}!"
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
    most = _most(text)
    return f"its exponents multiply to more than {most}" if total > most else ""


def _most(text: str) -> int:
    if not _LETTER.search(text):
        return MAX_EXPONENT
    return MAX_GROUP_EXPONENT if _GROUP_POWER.search(text) else MAX_SYMBOLIC_EXPONENT


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
