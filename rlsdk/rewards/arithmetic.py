"""Exact evaluation of arithmetic expressions written by a model: only integers, `+ - * /` and brackets.

The text is tokenised by one regular expression and evaluated by the shunting-yard algorithm on explicit stacks: the
number of steps is linear in the length of any text, without recursion or `eval`.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

MAX_CHARACTERS = 10_000
MAX_PENDING = 500
"""Maximum pending brackets, operators and signs: the depth of the tree."""

Ratio = tuple[int, int]
"""Numerator and denominator; the denominator is not 0 and may be negative."""

_SIGNS = str.maketrans({"−": "-", "×": "*", "÷": "/"})
_ALLOWED = re.compile(r"[0-9+\-*/()\s]*")
_TOKEN = re.compile(r"[0-9]+|[-+*/()]")
_NEGATE = "neg"
_BINDING = {"(": 0, "+": 1, "-": 1, "*": 2, "/": 2, _NEGATE: 3}


class NotAnExpressionError(ValueError):
    """The text is not an expression, exceeds the limits or divides by zero; the message says which."""


def tokenize(text: str) -> list[str]:
    """Split an expression into numbers, operators and brackets; the signs − × ÷ become - * /.

    Args:
        text: Text from the model.

    Raises:
        NotAnExpressionError: The text is too long, or contains a character that is not allowed in expressions.
    """
    if len(text) > MAX_CHARACTERS:
        raise NotAnExpressionError(f"{len(text)} characters are more than {MAX_CHARACTERS}")
    text = text.translate(_SIGNS)
    end = _ALLOWED.match(text).end()  # type: ignore[union-attr]  # it matches the empty text
    if end < len(text):
        raise NotAnExpressionError(f"the character {text[end]!r} is not allowed in an expression")
    return _TOKEN.findall(text)


def evaluate(tokens: Sequence[str]) -> Ratio:
    """Evaluate an expression exactly.

    The caller must limit the size and count of the numbers: the arithmetic is exact, and slow for long ones.

    Args:
        tokens: From `tokenize`.

    Raises:
        NotAnExpressionError: The tokens are not an expression, are nested too deeply, or divide by zero.
    """
    values: list[Ratio] = []
    pending: list[str] = []
    operand_next = True
    for token in tokens:
        if operand_next:
            operand_next = _operand(token, values, pending)
        elif token == ")":
            _close(values, pending)
        elif token in "+-*/":
            while pending and _BINDING[pending[-1]] >= _BINDING[token]:
                _apply(pending.pop(), values)
            pending.append(token)
            operand_next = True
        else:
            raise NotAnExpressionError(f"an operator is missing before {token[:20]!r}")
    if operand_next:
        raise NotAnExpressionError("a number is missing at the end")
    while pending:
        _apply(pending.pop(), values)
    return values[0]


def _operand(token: str, values: list[Ratio], pending: list[str]) -> bool:
    """Process a token where an operand is expected; return True if an operand is still expected."""
    if token not in "+-*/()":
        values.append((int(token), 1))
        return False
    if token == "+":  # a sign without effect
        return True
    if token in {"(", "-"}:
        pending.append(_NEGATE if token == "-" else token)
        if len(pending) > MAX_PENDING:
            raise NotAnExpressionError(
                f"it is nested too deeply: more than {MAX_PENDING} brackets and operators are open"
            )
        return True
    raise NotAnExpressionError(f"a number is missing before {token!r}")


def _close(values: list[Ratio], pending: list[str]) -> None:
    while pending and pending[-1] != "(":
        _apply(pending.pop(), values)
    if not pending:
        raise NotAnExpressionError("a bracket is closed that was never opened")
    pending.pop()


def _apply(operator: str, values: list[Ratio]) -> None:
    if operator == "(":
        raise NotAnExpressionError("a bracket is never closed")
    c, d = values.pop()
    if operator == _NEGATE:
        values.append((-c, d))
        return
    a, b = values.pop()
    if operator == "*":
        values.append((a * c, b * d))
    elif operator == "/":
        if c == 0:
            raise NotAnExpressionError("it divides by zero")
        values.append((a * d, b * c))
    else:
        values.append((a * d + c * b if operator == "+" else a * d - c * b, b * d))
