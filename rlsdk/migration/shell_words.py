"""Split a shell script into words and operators."""

from __future__ import annotations

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
