"""Parse the commands of a shell script without executing anything: words, variables, arrays, continuations."""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Callable, Mapping, Sequence
from fnmatch import translate
from posixpath import basename, dirname, normpath

import attrs

_LITERAL = "\ue000"
"""Placeholder for a dollar sign that quotes or a backslash protect."""
_QUOTED = "\ue003"
"""Placeholder for a dollar sign in double quotes: what it stands for is not split into words."""
_ENDS = {"\n", ";", "|", "&", "||", "&&", ";;", "(", ")"}
_ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)(\+?)=(.*)", re.DOTALL)
_NAME = re.compile(r"[A-Za-z_]\w*|[0-9]")
_PARAMETER = re.compile(r"(\w+)(?:\[[@*0]\])?(:?[-=?+]|,,|\^\^|##?|%%?)?(.*)", re.DOTALL)
_ENVIRONMENT = re.compile(r"\$\{oc\.env:(\w+)(?:,\s*(['\"]?)([^{}]*?)\2\s*)?\}")
_PLAIN = re.compile(r"([\w./@~ -]|\$\{oc\.env:[^{}]*\})*")
_WORDS_BEFORE = {
    "export",
    "declare",
    "local",
    "readonly",
    "set",
    "unset",
    "then",
    "else",
    "do",
    "exec",
    "nohup",
    "time",
    "env",
}
_OPENS, _CLOSES = {"if", "case", "for", "while", "until"}, {"fi", "esac", "done"}
_OPERATORS: Mapping[type[ast.AST], Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: lambda left, right: abs(left) // abs(right) * (1 if (left < 0) == (right < 0) else -1),
    ast.Mod: lambda left, right: abs(left) % abs(right) * (-1 if left < 0 else 1),
}
_LARGEST = 10**15


@attrs.frozen
class Command:
    """A command of a script.

    Attributes:
        words: Its words; variables that the script sets are filled in.
        notes: Parts that could not be read.
    """

    words: tuple[str, ...]
    notes: tuple[str, ...]


@attrs.define
class _Scope:
    """Variables of a script.

    Attributes:
        environ: Environment, for arithmetic.
        values: Variables that the script sets; an array has several words.
        uncertain: Variables whose value depends on a condition.
        used: Variables that were filled in.
        depth: Number of conditions and loops around the current statement.
    """

    environ: Mapping[str, str]
    values: dict[str, list[str]] = attrs.field(factory=dict)
    uncertain: set[str] = attrs.field(factory=set)
    used: set[str] = attrs.field(factory=set)
    depth: int = 0

    def assign(self, name: str, words: Sequence[str], *, append: bool) -> None:
        """Set or extend a variable."""
        self.used.clear()
        added = [value for word in words for value in _expanded(word.lstrip("\0"), self)]
        before = self.values.get(name)
        self.values[name] = [*(before or []), *added] if append else added
        conditional = self.depth > 0 and before is not None and before != self.values[name]
        if conditional or self.used & self.uncertain:
            self.uncertain.add(name)
        elif not append:
            self.uncertain.discard(name)


def commands(script: str, environ: Mapping[str, str] | None = None, place: str = "") -> list[Command]:
    """Split a script into commands.

    Variables that the script sets are filled in; others become `${oc.env:NAME}`, which an rlsdk config reads from the
    environment. Nothing is executed: of `$(...)`, only `pwd`, `basename`, `dirname` and a `cd` before `pwd` are known;
    others and backticks lead to a note. Arithmetic is computed.

    Args:
        script: Text of the script.
        environ: Environment, from which arithmetic takes variables that the script does not set.
        place: Path of the script, which `$0` and `BASH_SOURCE` stand for.
    """
    scope = _Scope(environ or {}, {"0": [place], "BASH_SOURCE": [place]} if place else {})
    found, statement = [], list[str]()
    tokens = [*_tokens(script.replace("\r", "")), "\n"]
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
            target = statement.pop().removeprefix("\0")
            scope.assign(target.rstrip("=").rstrip("+"), items, append=target.endswith("+="))
        elif token in _ENDS:
            found += _command(statement, scope)
            statement = []
        else:
            statement.append(token)
    return found


def _command(words: Sequence[str], scope: _Scope) -> list[Command]:
    """Convert a statement to a command; assignments at its beginning are added to the scope."""
    scope.depth += len(_OPENS & {*words[:1]}) - len(_CLOSES & {*words[:1]})
    rest = list(words)
    while rest:
        word = rest[0]
        match = _ASSIGNMENT.fullmatch(word)
        if match and not word.startswith("\0"):
            scope.assign(match[1], [match[3]], append=bool(match[2]))
        elif word not in _WORDS_BEFORE and not (word.startswith("-") and words[0] in _WORDS_BEFORE):
            break
        rest.pop(0)
    out: list[str] = []
    notes: list[str] = []
    skipped = False
    scope.used.clear()
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
    notes += [
        f"{name} depends on a condition in the script; the last value is taken: {' '.join(scope.values[name])}"
        for name in sorted(scope.used & scope.uncertain)
    ]
    cleaned = tuple(word.replace(_LITERAL, "$") for word in out)
    return [Command(cleaned, tuple(notes))] if cleaned else []


def _expanded(word: str, scope: _Scope) -> list[str]:
    """Fill in the variables of a word; an array becomes as many words as it holds."""
    array = re.fullmatch(rf"([${_QUOTED}])\{{?(\w+)(?:\[[@*]\]\}})?\}}?", word)
    if array and array[2] in scope.values:
        scope.used.add(array[2])
        held = scope.values[array[2]]
        if "[" in word:
            return held
        split = array[1] != _QUOTED and not any("$(" in value for value in held)
        return [part for value in held[:1] for part in value.split()] if split else held[:1]
    if re.fullmatch(rf"[${_QUOTED}](?:[@*\d]|\{{[@*](:\w+)*\}})", word):
        return []  # arguments of the script itself
    return [_filled(word, scope)]


def _filled(text: str, scope: _Scope) -> str:
    """Fill in the variables, arithmetic and simple substitutions of a text."""
    out, position = "", 0
    while position < len(text):
        char = text[position]
        position += 1
        after = text[position : position + 1]
        if char not in ("$", _QUOTED):
            out += char
        elif after in ("{", "("):
            close = _closing(text, position)
            inner = text[position + 1 : close]
            out += _parameter(inner, scope) if after == "{" else _substituted(inner, scope)
            position = close + 1
        elif name := _NAME.match(text, position):
            out += _variable(name[0], scope)
            position = name.end()
        else:
            out += "$"
    return out


def _variable(name: str, scope: _Scope) -> str:
    if name not in scope.values:
        return "" if name.isdigit() else f"${{oc.env:{name}}}"  # arguments of the script itself
    scope.used.add(name)
    return " ".join(scope.values[name])


def _parameter(inner: str, scope: _Scope) -> str:
    """Return what `${inner}` stands for."""
    match = _PARAMETER.fullmatch(inner)
    # OmegaConf's ${oc.env:NAME} looks like a parameter, but a shell's names have no dots.
    if match is None or (not match[2] and match[3].startswith(".")):
        return f"${{{inner}}}"
    name, operation, rest = match[1], match[2] or "", match[3]
    if operation in (":-", "-", ":=", "=") and name not in scope.values:
        fallback = _filled(_unquoted(rest), scope)
        if name.isdigit():
            return fallback
        shown = fallback if _PLAIN.fullmatch(fallback) else "'" + fallback.replace("'", "\\'") + "'"
        return f"${{oc.env:{name},{shown}}}"
    value = _variable(name, scope)
    if name in scope.values and operation in (",,", "^^"):
        return value.lower() if operation == ",," else value.upper()
    if name in scope.values and operation[:1] in ("#", "%"):
        return _without(value, operation, _filled(_unquoted(rest), scope))
    return value


def _without(value: str, operation: str, pattern: str) -> str:
    """Remove the beginning (`#`) or end (`%`) that a pattern matches; the longest if the operator is doubled."""
    fits = re.compile(translate(pattern))
    front = operation[0] == "#"
    lengths = range(len(value) + 1) if len(operation) == 1 else range(len(value), -1, -1)
    for length in lengths if len(value) < 1000 else ():
        part = value[:length] if front else value[len(value) - length :]
        if fits.fullmatch(part):
            return value[length:] if front else value[: len(value) - length]
    return value


def _substituted(inner: str, scope: _Scope) -> str:
    """Return what `$(inner)` stands for: arithmetic, and commands that only compute a path; others are kept."""
    if inner[:1] == "(" and inner[-1:] == ")":
        found = _arithmetic(_filled(inner[1:-1], scope), scope)
        return f"$({inner})" if found is None else str(found)
    tokens = [token.lstrip("\0") for token in _tokens(inner) if token != "--"]
    if tokens == ["pwd"]:
        return "${oc.env:PWD}"
    if tokens[:1] == ["cd"] and "&&" in tokens and tokens[tokens.index("&&") :][1:2] == ["pwd"]:
        return normpath(_filled(tokens[1], scope))
    words = [value for token in tokens[1:] for value in _expanded(token, scope)]
    words[:1] = [from_environment(word, scope.environ) for word in words[:1]]
    if tokens[:1] in (["basename"], ["dirname"]) and 1 <= len(words) <= 2 and not re.search(r"[$`]", words[0]):
        path = words[0].rstrip("/")
        return dirname(path) or "." if tokens[0] == "dirname" else basename(path).removesuffix(*words[1:] or ("",))
    return f"$({_filled(inner, scope)})"


def _arithmetic(expression: str, scope: _Scope) -> int | None:
    """Return the value of integer arithmetic; None if a part of it is unknown."""

    def value(node: ast.expr) -> int:
        if isinstance(node, ast.Constant) and type(node.value) is int:
            found = node.value
        elif isinstance(node, ast.Name):
            scope.used.add(node.id)
            held = " ".join(scope.values.get(node.id, [scope.environ.get(node.id, "")]))
            found = int(from_environment(held, scope.environ))
        elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
            found = -value(node.operand)
        elif isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
            found = _OPERATORS[type(node.op)](value(node.left), value(node.right))
        else:
            raise ValueError(expression)
        if abs(found) > _LARGEST:
            raise ValueError(expression)
        return found

    try:
        return value(ast.parse(from_environment(expression, scope.environ).strip(), mode="eval").body)
    except (SyntaxError, ValueError, ZeroDivisionError, RecursionError, MemoryError):
        return None


def from_environment(text: str, environ: Mapping[str, str]) -> str:
    """Fill in references to environment variables, or their fallbacks; those without either are kept."""
    for _ in range(10):
        filled = _ENVIRONMENT.sub(lambda match: environ.get(match[1], match[0] if match[3] is None else match[3]), text)
        if filled == text:
            break
        text = filled
    return text


def _unquoted(text: str) -> str:
    """Remove quotes inside `${NAME:-...}`."""
    return "".join(_tokens(text)) if re.search("['\"]", text) and not re.search(r"\s", text) else text.strip("'\"")


def _tokens(script: str) -> list[str]:
    """Split a script into words and operators; quotes are removed, and protected dollar signs are marked."""
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
        elif char == "\\" and script[position : position + 1] == "\n":
            position += 1  # the line continues; in a comment it does not
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
        if script[position : position + 2] == "\\\n":
            position += 1  # the line continues
        elif script[position] == "\\" and script[position + 1 : position + 2] in ('"', "\\", "$", "`"):
            position += 1
            out += _LITERAL if script[position] == "$" else script[position]
        elif script[position] == "$" and script[position + 1 : position + 2] in ("(", "{"):
            close = _closing(script, position + 1)  # may have quotes of its own
            out += _QUOTED + script[position + 1 : close + 1]
            position = close
        else:
            out += _QUOTED if script[position] == "$" else script[position]
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
