"""Words of a shell script, its integer arithmetic, and its conditions as far as their values are known."""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Callable, Mapping, Sequence
from fnmatch import fnmatchcase

import attrs

LITERAL = "\ue000"
"""Placeholder for a dollar sign that quotes or a backslash protect."""
QUOTED = "\ue003"
"""Placeholder for a dollar sign in double quotes: what it stands for is not split into words."""
ENDS = {"\n", ";", "|", "&", "||", "&&", ";;", "(", ")"}
"""Operators that end a statement."""


def split(script: str) -> list[str]:
    """Split a script into words and operators; quotes are removed, and protected dollar signs are marked."""
    tokens: list[str] = []
    word: str | None = None
    quoted = False
    position = 0

    def end() -> None:
        nonlocal word, quoted
        if word is not None:
            tokens.append(("\0" if quoted and word in ENDS | {"<", ">", "(", ")"} else "") + word)
        word, quoted = None, False

    while position < len(script):
        char = script[position]
        position += 1
        if char == "'":
            close = script.find("'", position)
            close = len(script) if close < 0 else close
            word = (word or "") + script[position:close].replace("$", LITERAL)
            position, quoted = close + 1, True
        elif char == '"':
            inner, position = _double_quoted(script, position)
            word, quoted = (word or "") + inner, True
        elif char == "\\" and script[position : position + 1] == "\n":
            position += 1  # the line continues; in a comment it does not
        elif char == "\\" and position < len(script):
            word = (word or "") + (LITERAL if script[position] == "$" else script[position])
            position += 1
        elif char == "$" and script[position : position + 1] in ("(", "{"):
            close = closing(script, position)
            word = (word or "") + script[position - 1 : close + 1]
            position = close + 1
        elif char == "#" and word is None:
            stop = script.find("\n", position)
            position = len(script) if stop < 0 else stop
        elif char in " \t":
            end()
        elif char in "\n;|&<>()":
            if char in "(" and word is not None and word.endswith("="):
                tokens.append(word)
                word = None
                tokens.append("(")
                continue
            if char == "&" and tokens[-1:] == [">"] and word is None:
                continue  # 2>&1
            end()
            pair = char + script[position : position + 1]
            position += pair in ("||", "&&", ">>", "<<", ";;")
            tokens.append(pair if pair in ("||", "&&", ">>", "<<", ";;") else char)
        else:
            word = (word or "") + char
    end()
    return tokens


def _double_quoted(script: str, position: int) -> tuple[str, int]:
    """Return the text in double quotes that starts at `position`, and the position after the closing quote."""
    out = ""
    while position < len(script) and script[position] != '"':
        if script[position : position + 2] == "\\\n":
            position += 1  # the line continues
        elif script[position] == "\\" and script[position + 1 : position + 2] in ('"', "\\", "$", "`"):
            position += 1
            out += LITERAL if script[position] == "$" else script[position]
        elif script[position] == "$" and script[position + 1 : position + 2] in ("(", "{"):
            close = closing(script, position + 1)  # may have quotes of its own
            out += QUOTED + script[position + 1 : close + 1]
            position = close
        else:
            out += QUOTED if script[position] == "$" else script[position]
        position += 1
    return out, position + 1


def closing(script: str, position: int) -> int:
    """Return the position that closes the bracket at `position`; the end of the script if nothing does."""
    opened, closed = script[position], {"(": ")", "{": "}"}[script[position]]
    depth = 0
    for index in range(position, len(script)):
        depth += (script[index] == opened) - (script[index] == closed)
        if depth == 0:
            return index
    return len(script) - 1


_ARITHMETIC: Mapping[type[ast.AST], Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: lambda left, right: abs(left) // abs(right) * (1 if (left < 0) == (right < 0) else -1),
    ast.Mod: lambda left, right: abs(left) % abs(right) * (-1 if left < 0 else 1),
}
_LARGEST = 10**15


def computed(expression: str, value_of: Callable[[str], int]) -> int | None:
    """Return the value of an expression; None if a part of it is unknown.

    Args:
        expression: The expression.
        value_of: Returns the value of a variable; raises ValueError for one that is unknown.
    """

    def value(node: ast.expr) -> int:
        if isinstance(node, ast.Constant) and type(node.value) is int:
            found = node.value
        elif isinstance(node, ast.Name):
            found = value_of(node.id)
        elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
            found = -value(node.operand)
        elif isinstance(node, ast.BinOp) and type(node.op) in _ARITHMETIC:
            found = _ARITHMETIC[type(node.op)](value(node.left), value(node.right))
        else:
            raise ValueError(expression)
        if abs(found) > _LARGEST:
            raise ValueError(expression)
        return found

    try:
        return value(ast.parse(expression.strip(), mode="eval").body)
    except (SyntaxError, ValueError, ZeroDivisionError, RecursionError, MemoryError):
        return None


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


_CONNECTIVES: Mapping[str, Callable[[bool | None, bool | None], bool | None]] = {
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
        while (token := self._next()) in _CONNECTIVES:
            self.position += 1
            found = _CONNECTIVES[token](found, read())
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
        while (token := self._next()) not in ("", *_CONNECTIVES):
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
