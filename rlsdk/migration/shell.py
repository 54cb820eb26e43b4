"""Parse the commands of a shell script without executing anything: words, variables, arrays, continuations."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

import attrs

_LITERAL = "\ue000"
"""Placeholder for a dollar sign that quotes or a backslash protect."""
_ENDS = {"\n", ";", "|", "&", "||", "&&", ";;"}
_ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)(\+?)=(.*)", re.DOTALL)
_VARIABLE = re.compile(r"\$(?:(\w+)|\{(\w+)(?:(:?[-=?+])([^{}]*))?\}|\{(\w+)\[[@*]\]\})")
_WORDS_BEFORE = {"export", "declare", "local", "readonly", "set", "unset", "then", "do", "exec", "nohup", "time", "env"}


@attrs.frozen
class Command:
    """A command of a script.

    Attributes:
        words: Its words; variables that the script sets are filled in.
        notes: Parts that could not be read.
    """

    words: tuple[str, ...]
    notes: tuple[str, ...]


def commands(script: str) -> list[Command]:
    """Split a script into commands.

    Variables that the script sets are filled in; others become `${oc.env:NAME}`, which an rlsdk config reads from the
    environment. Nothing is executed: `$(...)` and backticks lead to a note.
    """
    scope: dict[str, list[str]] = {}
    found, statement = [], list[str]()
    tokens = [*_tokens(script), "\n"]
    position = 0
    while position < len(tokens):
        token = tokens[position]
        position += 1
        if token == "(" and statement and statement[-1].endswith("="):  # an array: NAME=( words )
            items: list[str] = []
            while position < len(tokens) and tokens[position] != ")":
                items += [tokens[position]] if tokens[position] != "\n" else []
                position += 1
            position += 1
            _assign(scope, statement.pop().removeprefix("\0"), items)
        elif token in _ENDS:
            found += _command(statement, scope)
            statement = []
        else:
            statement.append(token)
    return found


def _command(words: Sequence[str], scope: dict[str, list[str]]) -> list[Command]:
    """Convert a statement to a command; assignments at its beginning are added to the scope."""
    rest = list(words)
    while rest:
        word = rest[0]
        match = _ASSIGNMENT.fullmatch(word)
        if match and not word.startswith("\0"):
            _assign(scope, f"{match[1]}{match[2]}=", [match[3]])
        elif word not in _WORDS_BEFORE and not (word.startswith("-") and words[0] in _WORDS_BEFORE):
            break
        rest.pop(0)
    out: list[str] = []
    notes: list[str] = []
    skipped = False
    for word in rest:
        if word in ("<", ">", ">>", "<<", "<<<"):
            if out and out[-1].isdigit():
                out.pop()  # 2> file
            skipped = True
        elif skipped:
            skipped = False
        else:
            out += _expanded(word.lstrip("\0"), scope)
    joined = " ".join(out)
    if re.search(r"\$\(|`", joined):
        notes.append("$(...) and backticks are not executed: write the value instead")
    cleaned = tuple(word.replace(_LITERAL, "$") for word in out)
    return [Command(cleaned, tuple(notes))] if cleaned else []


def _assign(scope: dict[str, list[str]], target: str, words: Sequence[str]) -> None:
    name = target.rstrip("=").rstrip("+")
    values = [value for word in words for value in _expanded(word.lstrip("\0"), scope)]
    scope[name] = [*scope.get(name, []), *values] if target.endswith("+=") else values


def _expanded(word: str, scope: Mapping[str, list[str]]) -> list[str]:
    """Fill in the variables of a word; an array becomes as many words as it holds."""
    array = re.fullmatch(r"\$\{?(\w+)(?:\[[@*]\]\})?\}?", word)
    if array and array[1] in scope:
        return scope[array[1]] if "[" in word or len(scope[array[1]]) == 1 else scope[array[1]][:1]
    if re.fullmatch(r"\$[@*]|\$\{[@*](:\w+)*\}|\$\d", word):
        return []  # arguments of the script itself

    def fill(match: re.Match[str]) -> str:
        name = match[1] or match[2] or match[5]
        if name in scope:
            return " ".join(scope[name])
        if match[4] is not None and match[3] in (":-", "-", ":=", "="):
            return f"${{oc.env:{name},{_VARIABLE.sub(fill, match[4])}}}"
        return f"${{oc.env:{name}}}"

    return [_VARIABLE.sub(fill, word)]


def _tokens(script: str) -> list[str]:
    """Split a script into words and operators; quotes are removed, and protected dollar signs are marked."""
    script = re.sub(r"\\\r?\n", " ", script).replace("\r", "")
    tokens: list[str] = []
    word: str | None = None
    quoted = False
    position = 0

    def end() -> None:
        nonlocal word, quoted
        if word is not None:
            tokens.append(("\0" if quoted and word in _ENDS | {"<", ">", "(", ")"} else "") + word)
        word, quoted = None, False

    while position < len(script):
        char = script[position]
        position += 1
        if char == "'":
            close = script.find("'", position)
            close = len(script) if close < 0 else close
            word = (word or "") + script[position:close].replace("$", _LITERAL)
            position, quoted = close + 1, True
        elif char == '"':
            inner, position = _double_quoted(script, position)
            word, quoted = (word or "") + inner, True
        elif char == "\\" and position < len(script):
            word = (word or "") + (_LITERAL if script[position] == "$" else script[position])
            position += 1
        elif char == "$" and script[position : position + 1] in ("(", "{"):
            close = _closing(script, position)
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
        if script[position] == "\\" and script[position + 1 : position + 2] in ('"', "\\", "$", "`"):
            position += 1
            out += _LITERAL if script[position] == "$" else script[position]
        else:
            out += script[position]
        position += 1
    return out, position + 1


def _closing(script: str, position: int) -> int:
    """Return the position that closes the bracket at `position`; the end of the script if nothing does."""
    opened, closed = script[position], {"(": ")", "{": "}"}[script[position]]
    depth = 0
    for index in range(position, len(script)):
        depth += (script[index] == opened) - (script[index] == closed)
        if depth == 0:
            return index
    return len(script) - 1
