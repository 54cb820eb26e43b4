"""Comparison of tested code's output with the expected output, as plain data outside the sandbox."""

from __future__ import annotations

import json
import math
from typing import Any

from rlsdk.isolation.sandboxed.plain import encode

_LONGEST_NUMBER = 64
"""Characters of a word that may be read as a number."""


def same_text(given: str, expected: str, tolerance: float | None) -> bool:
    """Compare two outputs line by line and word by word; runs of spaces count as one, and blank lines are ignored.

    Args:
        given: Output of a program.
        expected: Expected output.
        tolerance: Allowed difference of words that are numbers: absolute below 1, relative above.
    """
    ours, theirs = _words(given), _words(expected)
    if ours == theirs:
        return True
    if tolerance is None or list(map(len, ours)) != list(map(len, theirs)):
        return False
    pairs = ((a, b) for one, other in zip(ours, theirs, strict=True) for a, b in zip(one, other, strict=True))
    return all(a == b or _near(_number(a), _number(b), tolerance) for a, b in pairs)


def _words(text: str) -> list[list[str]]:
    return [words for line in text.splitlines() if (words := line.split())]


def _number(word: str) -> float | None:
    if len(word) > _LONGEST_NUMBER or not word.isascii() or "_" in word:
        return None
    try:
        return float(word)
    except ValueError:
        return None


def _near(a: float | None, b: float | None, tolerance: float) -> bool:
    if a is None or b is None or not (math.isfinite(a) and math.isfinite(b)):
        return False
    return abs(a - b) <= tolerance * max(1.0, abs(b))


def same_value(given: Any, expected: Any, tolerance: float | None, *, as_json: bool) -> bool:
    """Compare a result with an expected value; numbers are equal across their types, as in Python.

    Args:
        given: Result of `encode`, passed through JSON.
        expected: Expected Python value.
        tolerance: Allowed difference of numbers: absolute below 1, relative above.
        as_json: True if the expected value comes from JSON, which has no tuples and only text keys in mappings.
    """
    return _CodeComparison(tolerance, as_json).same(given, encode(expected))


class _CodeComparison:
    def __init__(self, tolerance: float | None, as_json: bool) -> None:
        self._tolerance, self._as_json = tolerance, as_json

    def same(self, a: Any, b: Any) -> bool:
        if isinstance(a, dict) and isinstance(b, dict):
            return self._same_held(a, b)
        if isinstance(a, bool | int | float) and isinstance(b, bool | int | float):
            return a == b or self._near_numbers(a, b)
        return type(a) is type(b) and not isinstance(a, list) and bool(a == b)

    def _near_numbers(self, a: float, b: float) -> bool:
        try:
            return self._tolerance is not None and _near(float(a), float(b), self._tolerance)
        except OverflowError:  # an integer too large for a float
            return False

    def _same_held(self, a: dict[str, Any], b: dict[str, Any]) -> bool:
        if len(a) != 1:
            return False
        ((kind, ours),), ((wanted, theirs),) = a.items(), b.items()
        if self._as_json and kind == "tuple":
            kind = "list"
        if kind != wanted or kind == "other" or type(ours) is not type(theirs):
            return False
        if kind in ("list", "tuple"):
            return len(ours) == len(theirs) and all(map(self.same, ours, theirs))
        if kind == "set":
            return {self._key(each) for each in ours} == {self._key(each) for each in theirs}
        if kind == "dict":
            mine, others = self._by_key(ours), self._by_key(theirs)
            return mine.keys() == others.keys() and all(self.same(mine[key], others[key]) for key in mine)
        return bool(ours == theirs)

    def _by_key(self, pairs: list[Any]) -> dict[str, Any]:
        return {self._key(key): value for key, value in pairs}

    def _key(self, value: Any) -> str:
        """Return a text that is the same for equal keys."""
        if self._as_json and isinstance(value, bool | int | float | None):
            value = json.dumps(value)
        return json.dumps(_plain(value), sort_keys=True)


def _plain(value: Any) -> Any:
    """Return a value with equal numbers (1, 1.0 and True) written the same way."""
    if isinstance(value, bool):
        return int(value)
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, list):
        return [_plain(each) for each in value]
    return {name: _plain(each) for name, each in value.items()} if isinstance(value, dict) else value
