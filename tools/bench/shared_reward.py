"""The reward of both trainers in `make bench-peers`: TinyZero's for Countdown, as a pure function.

It imports only the standard library, so that a peer's environment can import it. The reward is 1 for a right answer,
0.1 for a wrong answer in the right form, 0 otherwise.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from fractions import Fraction

RIGHT, FORM, NOTHING = 1.0, 0.1, 0.0
_ANSWER = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)
_TOKEN = re.compile(r"\s*(?:([0-9]{1,9})|([-+*/()]))")
_MAX_CHARACTERS = 200


def countdown(text: str, target: int, numbers: Sequence[int]) -> float:
    """Score an answer to "make `target` from `numbers`, each used exactly once".

    Args:
        text: Text of the policy; its last `<answer>…</answer>` counts.
        target: Integer to reach.
        numbers: Non-negative integers.

    Returns:
        1.0, 0.1 or 0.0.
    """
    found = _ANSWER.findall(text)
    if not found or not found[-1].strip():
        return NOTHING
    tokens = _tokens(found[-1].strip())
    if tokens is None or sorted(t for t in tokens if t.isdigit()) != sorted(map(str, numbers)):
        return FORM
    parser = _Parser(tokens)
    try:
        value = parser.sum()
    except (ValueError, ZeroDivisionError):
        return FORM
    return RIGHT if parser.done and value == target else FORM


def _tokens(text: str) -> list[str] | None:
    found, at = [], 0
    if len(text) > _MAX_CHARACTERS:
        return None
    while at < len(text):
        match = _TOKEN.match(text, at)
        if match is None:
            return None
        found.append(match[1] or match[2])
        at = match.end()
    return found


class _Parser:
    """Computes the exact value of an arithmetic expression by recursive descent; raises ValueError for other texts."""

    def __init__(self, tokens: list[str]) -> None:
        self._tokens = tokens
        self._at = 0

    @property
    def done(self) -> bool:
        return self._at == len(self._tokens)

    def sum(self) -> Fraction:
        value = self._product()
        while (operator := self._take("+-")) is not None:
            other = self._product()
            value = value + other if operator == "+" else value - other
        return value

    def _product(self) -> Fraction:
        value = self._atom()
        while (operator := self._take("*/")) is not None:
            other = self._atom()
            value = value * other if operator == "*" else value / other
        return value

    def _atom(self) -> Fraction:
        if self._take("(") is not None:
            value = self.sum()
            if self._take(")") is None:
                raise ValueError("a bracket is not closed")
            return value
        if (sign := self._take("+-")) is not None:
            return self._atom() if sign == "+" else -self._atom()
        if self.done or not self._tokens[self._at].isdigit():
            raise ValueError("expected a number")
        self._at += 1
        return Fraction(int(self._tokens[self._at - 1]))

    def _take(self, wanted: str) -> str | None:
        if self.done or self._tokens[self._at] not in wanted:
            return None
        self._at += 1
        return self._tokens[self._at - 1]
