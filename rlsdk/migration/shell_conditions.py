"""Decide the conditions of a shell script whose values are known; nothing is executed."""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Mapping, Sequence
from fnmatch import fnmatchcase

import attrs

KnownValue = Callable[[str], str | None]
"""Returns the value of a word; None if it is known only when the script runs."""
_INTEGERS: Mapping[str, Callable[[int, int], bool]] = {
    "-eq": operator.eq,
    "-ne": operator.ne,
    "-lt": operator.lt,
    "-le": operator.le,
    "-gt": operator.gt,
    "-ge": operator.ge,
}
_CLOSES = {"[": "]", "[[": "]]"}
_SEPARATORS = {"\n", ";"}


@attrs.define
class Branches:
    """The branches of an `if` or a `case`, of which the shell takes one at most.

    Attributes:
        word: Value that a `case` compares; None for an `if`, or if it is unknown.
        is_case: True for a `case`.
        active: True inside the branch that is taken, False inside others; None if that is unknown.
        taken: True if a branch was taken; None if that is unknown.
    """

    word: str | None = None
    is_case: bool = False
    active: bool | None = False
    taken: bool | None = False

    def enter(self, condition: bool | None) -> None:
        """Enter the next branch, which the shell takes if the condition holds and it has taken none before."""
        self.active = _both(None if self.taken is None else not self.taken, condition)
        self.taken = _either(self.taken, condition)

    def enter_case(self, patterns: Sequence[str]) -> None:
        """Enter the next branch of a `case`."""
        word = self.word
        self.enter(None if word is None else any(fnmatchcase(word, pattern.lstrip("\0")) for pattern in patterns))


def truth(tokens: Sequence[str], value: KnownValue) -> bool | None:
    """Return whether a condition holds; None if that is known only when the script runs."""
    condition = _Condition(tokens, value)
    return condition.joined(condition.term)


def _both(left: bool | None, right: bool | None) -> bool | None:
    return False if left is False or right is False else None if left is None or right is None else True


def _either(left: bool | None, right: bool | None) -> bool | None:
    return True if left is True or right is True else None if left is None or right is None else False


_OPERATORS: Mapping[str, Callable[[bool | None, bool | None], bool | None]] = {
    "&&": _both,
    "-a": _both,
    "||": _either,
    "-o": _either,
}


@attrs.define
class _Condition:
    """Recursive descent through the words of a condition.

    Attributes:
        tokens: Words and operators.
        value: Looks up words.
        position: Index of the next token.
    """

    tokens: Sequence[str]
    value: KnownValue
    position: int = 0

    def joined(self, read: Callable[[], bool | None]) -> bool | None:
        """Read conditions joined by `&&` and `||`, which have the same precedence outside of square brackets."""
        found = read()
        while (token := self._next()) in _OPERATORS:
            self.position += 1
            found = _OPERATORS[token](found, read())
        return found

    def _next(self) -> str:
        while self.position < len(self.tokens) and self.tokens[self.position] in _SEPARATORS:
            self.position += 1
        return self.tokens[self.position] if self.position < len(self.tokens) else ""

    def term(self) -> bool | None:
        token = self._next()
        self.position += 1
        if token == "!":
            inner = self.term()
            return None if inner is None else not inner
        if token in ("{", "("):
            found = self.joined(self.term)
            self._next()
            self.position += 1  # the closing bracket
            return found
        if token in _CLOSES:
            start = self.position
            rest = self.tokens[start:]
            stop = rest.index(_CLOSES[token]) if _CLOSES[token] in rest else len(rest)
            self.position += stop + 1
            inside = _Condition(rest[:stop], self.value)
            return inside.joined(inside.comparison)
        while self._next() not in ("", "&&", "||", "}", ")"):
            self.position += 1  # a command, which is not executed
        return {"true": True, ":": True, "false": False}.get(token)

    def comparison(self) -> bool | None:
        words: list[str] = []
        while (token := self._next()) not in ("", *_OPERATORS):
            words.append(token)
            self.position += 1
        negated = len(words) > 1 and words[0] == "!"
        found = self._test(words[negated:])
        return not found if negated and found is not None else found

    def _test(self, words: Sequence[str]) -> bool | None:
        if len(words) == 1 or (len(words) == 2 and words[0] in ("-n", "-z")):
            held = self.value(words[-1])
            return None if held is None else bool(held) != (words[0] == "-z" and len(words) == 2)
        if len(words) != 3:
            return None
        left, right = self.value(words[0]), self.value(words[2])
        if left is None or right is None:
            return None
        if words[1] in ("=", "==", "!="):
            return fnmatchcase(left, right) == (words[1] != "!=")
        whole = all(re.fullmatch(r"\s*-?\d{1,15}\s*", text) for text in (left, right))
        return _INTEGERS[words[1]](int(left), int(right)) if words[1] in _INTEGERS and whole else None
