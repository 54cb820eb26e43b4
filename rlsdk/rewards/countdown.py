"""Countdown: reach a target from given numbers, each used exactly once.

Expressions contain only integers, `+ - * /` and brackets, and are evaluated exactly. The text is tokenised by one
regular expression and evaluated by the shunting-yard algorithm on explicit stacks: the number of steps is linear in the
length of any text, without recursion or `eval`.
"""

from __future__ import annotations

import operator
import re
import reprlib
from collections.abc import Iterable, Mapping, Sequence
from fractions import Fraction
from types import MappingProxyType
from typing import Any

import rlsdk
from rlsdk.errors import DataError
from rlsdk.types import Rollout, Score, Task

MAX_CHARACTERS = 10_000
MAX_PENDING = 500
"""Maximum pending brackets, operators and signs: the depth of the tree."""
LONGEST_ANSWER = 500
"""Characters of an answer that rewards keep with its score."""

_MAX_VOTE_BITS = 1_000
"""Greater numbers do not count as votes: their digits could be longer than an answer."""

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

    Raises:
        NotAnExpressionError: The text is too long, or contains a character that is not allowed in expressions.
    """
    if len(text) > MAX_CHARACTERS:
        raise NotAnExpressionError(f"{len(text)} characters are more than {MAX_CHARACTERS}")
    if not text.isascii():
        text = text.translate(_SIGNS)
    end = _ALLOWED.match(text).end()  # type: ignore[union-attr]  # it matches the empty text
    if end < len(text):
        raise NotAnExpressionError(f"the character {text[end]!r} is not allowed in an expression")
    return _TOKEN.findall(text)


def evaluate(tokens: Sequence[str]) -> Ratio:
    """Evaluate an expression exactly.

    The caller must limit the size and count of the numbers: the arithmetic is exact, and slow for long ones.

    Raises:
        NotAnExpressionError: The tokens are not an expression, are nested too deeply, or divide by zero.
    """
    values: list[Ratio] = []
    pending: list[str] = []
    operand_next = True
    for token in tokens:
        if operand_next and token.isdecimal():
            values.append((int(token), 1))
            operand_next = False
        elif operand_next:
            _open(token, pending)
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


def _open(token: str, pending: list[str]) -> None:
    """Process a sign or bracket that precedes an operand; a plus has no effect."""
    if token in {"(", "-"}:
        pending.append(_NEGATE if token == "-" else token)
        if len(pending) > MAX_PENDING:
            raise NotAnExpressionError(
                f"it is nested too deeply: more than {MAX_PENDING} brackets and operators are open"
            )
    elif token != "+":
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


# Built-in types come first: an abstract class takes several times as long to check.
_MAPPINGS, _LISTS, _NOT_LISTS = (dict, Mapping), (list, Iterable), (str, bytes, Mapping)
_RIGHT = MappingProxyType({"correct": 1.0, "format": 1.0})
_WRONG = MappingProxyType({"correct": 0.0, "format": 1.0})
_NO_ANSWER = MappingProxyType({"correct": 0.0, "format": 0.0})
_OPEN, _CLOSE = "<answer>", "</answer>"
_RESULT = re.compile(r"([-−+]?)\s*([0-9]{1,40})")
_MAX_RESULT = 50
"""Maximum characters after `=`, far more than any target has."""


@rlsdk.reward("countdown", runs="driver", cache=True)
def countdown(
    rollout: Rollout, *, format_score: float = 0.1, score: float = 1.0, zero_truncated: bool = False
) -> Score:
    """Score an expression that must use each offered number exactly once and equal the target.

    The last `<answer>…</answer>` that the policy wrote counts, whatever follows it. It may contain whole numbers, `+ -
    * /` (or `− × ÷`) and brackets, and may end with `= TARGET`. The comparison is exact.

    Args:
        rollout: Rollout to score; its task's answer holds the target and the numbers.
        format_score: Score of a wrong answer: other numbers, another value, not an expression, division by zero.
        score: Score of a right answer.
        zero_truncated: Score truncated responses 0, whatever they contain; otherwise nothing teaches the policy to stop
            after its answer.

    Returns:
        A score with the metrics `correct` and `format` (0 or 1), and the value of an expression that uses each number
        exactly once, or the text of any other answer, by which votes are counted; its reason says why it is low.

    Raises:
        DataError: The task's answer is not `{"target": 24, "numbers": [3, 8]}`.
    """
    target, offered = _goal(rollout.task)
    if zero_truncated and rollout.status == "truncated":
        return _nothing("the response was truncated")
    answer = last_answer(rollout.response)
    if answer is None:
        return _nothing("there is no <answer> … </answer>")
    if not answer:
        return _nothing("the answer is empty")
    fault, vote = _checked(answer, target, offered)
    told = vote or " ".join(answer[:LONGEST_ANSWER].split())
    if fault:
        return Score(format_score, metrics=_WRONG, reason=fault, answer=told)
    return Score(score, metrics=_RIGHT, answer=told)


def last_answer(text: str) -> str | None:
    """Return the stripped content of the last closed `<answer>` of a text; None if there is none.

    Tags pair up from the left, so a nested answer keeps its inner tag and is not an expression.
    """
    found = None
    start = text.find(_OPEN)
    while start >= 0:
        start += len(_OPEN)
        end = text.find(_CLOSE, start)
        if end < 0:
            break
        found = (start, end)
        start = text.find(_OPEN, end + len(_CLOSE))
    return None if found is None else text[found[0] : found[1]].strip()


def _nothing(reason: str) -> Score:
    return Score(0.0, metrics=_NO_ANSWER, reason=reason)


def _checked(answer: str, target: Fraction | int, offered: list[str]) -> tuple[str, str]:
    """Return why an answer is wrong, empty if it is right, and its vote, empty if it is not an expression."""
    expression, equals, result = answer.partition("=")
    if equals:
        result = result.strip()
        stated = _RESULT.fullmatch(result) if len(result) <= _MAX_RESULT else None
        if stated is None or int(stated[2]) * (-1 if stated[1] in ("-", "−") else 1) != target:
            return f"the number after '=' is not the target {target}", ""
    try:
        tokens = tokenize(expression)
        # Check before evaluating, so that the expression has no more and no larger numbers than the task.
        if sorted([token for token in tokens if token.isdecimal()]) != offered:
            return f"it must use each of {', '.join(offered)} exactly once", " ".join(tokens)[:LONGEST_ANSWER]
        numerator, denominator = evaluate(tokens)
    except NotAnExpressionError as error:
        return str(error), ""
    if numerator * target.denominator == target.numerator * denominator:
        return "", str(target)
    value = numerator if denominator == 1 else Fraction(numerator, denominator)
    return f"its value is not the target {target}", vote_for(value)


def vote_for(value: Fraction | int) -> str:
    """Return a number in the form by which votes are counted: a fraction in lowest terms; empty if it is too long."""
    bits = max(map(int.bit_length, value.as_integer_ratio()))
    return str(value) if bits <= _MAX_VOTE_BITS else ""


def _goal(task: Task) -> tuple[Fraction | int, list[str]]:
    """Return the target, and the offered numbers as text, sorted."""
    answer = task.answer
    if not isinstance(answer, _MAPPINGS) or "target" not in answer or "numbers" not in answer:
        example = "{'target': 24, 'numbers': [3, 8]}"
        raise DataError(f"{_name(task)}: expected an answer like {example}, got {reprlib.repr(answer)}")
    target, numbers = _number(answer["target"]), answer["numbers"]
    if target is None:
        raise DataError(f"{_name(task)}: expected a number as target, got {reprlib.repr(answer['target'])}")
    listed = isinstance(numbers, _LISTS) and (type(numbers) is list or not isinstance(numbers, _NOT_LISTS))
    offered = [n if type(n) is int else _number(n) for n in numbers] if listed else []
    if not offered or [n for n in offered if n is None or n < 0 or n.denominator != 1]:
        rule = "a list of whole numbers from 0 upwards"
        raise DataError(f"{_name(task)}: expected {rule} as numbers, got {reprlib.repr(numbers)}")
    return target, sorted(map(str, offered))


def _number(value: Any) -> Fraction | int | None:
    """Return the exact value of a number or numpy scalar; None for anything else."""
    if type(value) is int:
        return value
    if isinstance(value, bool | str | bytes) or not hasattr(value, "__float__"):
        return None
    try:
        return operator.index(value) if hasattr(value, "__index__") else Fraction(float(value))
    except (TypeError, ValueError, OverflowError):  # an array of several numbers, NaN, infinity
        return None


def _name(task: Task) -> str:
    return f"task {task.id!r}" + (f" of {task.source!r}" if task.source else "")
