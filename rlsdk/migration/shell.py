"""Parse the commands of a shell script without executing anything: words, variables, arrays, continuations."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from fnmatch import translate
from posixpath import basename, dirname, normpath

import attrs

from rlsdk.migration.hydra import ENVIRONMENT, from_environment
from rlsdk.migration.shell_words import ENDS, LITERAL, QUOTED, Branches, closing, computed, split, truth

_ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)(\+?)=(.*)", re.DOTALL)
_NAME = re.compile(r"[A-Za-z_]\w*|[0-9]")
_PARAMETER = re.compile(r"(\w+)(?:\[[@*0]\])?(:?[-=?+]|,,|\^\^|##?|%%?)?(.*)", re.DOTALL)
_PLAIN = re.compile(r"[\w./@ -]*")
_PLAIN_REFERENCE = re.compile(r"\$\{oc\.env:\w+(,[\w./@ -]*)?\}")
_CHOICE_OF_NPU = re.compile(r"&&\s*echo\s+npu\s*\|\|\s*echo\s+(\w+)\s*")
_WORDS_BEFORE = frozenset(
    ["export", "declare", "local", "readonly", "set", "unset", "then", "else", "do", "exec", "nohup", "time", "env"]
)
_OPENS, _CLOSES = {"for", "while", "until"}, {"done"}
_LONGEST = 200
"""Maximum words of a condition."""


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
        environ: Environment, for arithmetic and conditions.
        values: Variables that the script sets; an array has several words.
        uncertain: Variables whose value depends on a condition that is known only when the script runs.
        used: Variables that were filled in.
        arguments: Arguments of the script, such as `1`, and variables that take their values.
        depth: Number of loops around the current statement.
        in_doubt: True if a condition around the current statement is known only when the script runs.
    """

    environ: Mapping[str, str]
    values: dict[str, list[str]] = attrs.field(factory=dict)
    uncertain: set[str] = attrs.field(factory=set)
    used: set[str] = attrs.field(factory=set)
    arguments: set[str] = attrs.field(factory=set)
    depth: int = 0
    in_doubt: bool = False

    def assign(self, name: str, words: Sequence[str], *, append: bool) -> None:
        """Set or extend a variable."""
        self.used.clear()
        added = [value for word in words for value in _expanded(word.lstrip("\0"), self)]
        before = self.values.get(name)
        self.values[name] = [*(before or []), *added] if append else added
        conditional = (self.depth > 0 or self.in_doubt) and before is not None and before != self.values[name]
        if conditional or self.used & self.uncertain:
            self.uncertain.add(name)
        elif not append:
            self.uncertain.discard(name)
        if self.used & self.arguments:
            self.arguments.add(name)
        elif not append:
            self.arguments.discard(name)

    def use_argument(self, name: str) -> None:
        """Note that the value of a word depends on an argument of the script."""
        self.used.add(name)
        self.arguments.add(name)


def commands(script: str, environ: Mapping[str, str] | None = None, place: str = "") -> list[Command]:
    """Split a script into commands.

    Variables that the script sets are filled in; others become `${oc.env:NAME}`, which an rlsdk config reads from the
    environment. Nothing is executed: of `$(...)`, only `pwd`, `basename`, `dirname` and a `cd` before `pwd` are known;
    others and backticks lead to a note. Arithmetic is computed; conditions are decided where values are known.

    Args:
        script: Text of the script.
        environ: Environment, from which arithmetic and conditions take variables that the script does not set.
        place: Path of the script, which `$0` and `BASH_SOURCE` stand for.
    """
    scope = _Scope(environ or {}, {"0": [place], "BASH_SOURCE": [place]} if place else {})
    return _Reader([*split(script.replace("\r", "")), "\n"], scope).commands()


@attrs.define
class _Reader:
    """Reads the statements of a script in order, without those of branches that are not taken.

    Attributes:
        tokens: Words and operators of the script.
        scope: Variables.
        position: Index of the next token.
        blocks: The `if` and `case` around the current statement.
        runs: True if the shell runs the statement, False if a test before `&&` or `||` prevents it; None if unknown.
        status: Exit status of the statements that such operators join; None if unknown.
    """

    tokens: Sequence[str]
    scope: _Scope
    position: int = 0
    blocks: list[Branches] = attrs.field(factory=list)
    runs: bool | None = True
    status: bool | None = True

    def commands(self) -> list[Command]:
        """Return the commands that the script runs, or may run."""
        found: list[Command] = []
        statement: list[str] = []
        while self.position < len(self.tokens):
            token = self.tokens[self.position]
            self.position += 1
            if not statement and self._enters(token):
                continue
            self.scope.in_doubt = self.runs is None or any(block.active is None for block in self.blocks)
            skipped = self.runs is False or any(block.active is False for block in self.blocks)
            if token == "(" and statement and statement[-1].endswith("="):  # an array: NAME=( words )
                self._array(statement, skipped=skipped)
            elif token in ENDS:
                found += [] if skipped else _command(statement, self.scope)
                self._join(token, statement)
                statement = []
                if token == ";;" and self.blocks and self.blocks[-1].is_case:
                    self._enter_case()
            else:
                statement.append(token)
        return found

    def _enters(self, token: str) -> bool:
        """Enter or leave a branch if the token begins or ends one."""
        rest = self.tokens[self.position : self.position + _LONGEST]
        inside = self.blocks[-1] if self.blocks else None
        if token in ("do", "then"):
            return True
        if token in ("if", "elif") and "then" in rest:
            length = rest.index("then")
            condition = truth(rest[:length], self._value)
            self.position += length + 1
            if token == "if":
                self.blocks.append(Branches())
            if self.blocks:
                self.blocks[-1].enter(condition)
        elif token == "else" and inside:
            inside.enter(True)
        elif token in ("fi", "esac") and inside:
            self.blocks.pop()
        elif token == "case" and rest[1:2] == ["in"]:
            self.position += 2
            self.blocks.append(Branches(self._value(rest[0]), is_case=True))
            self._enter_case()
        else:
            return False
        return True

    def _enter_case(self) -> None:
        """Read the patterns of the next branch of a `case`; leave it if there is none."""
        patterns: list[str] = []
        while self.position < len(self.tokens):
            token = self.tokens[self.position]
            self.position += 1
            if token == ")":
                break
            if token == "esac" and not patterns:
                self.blocks.pop()
                return
            patterns += [token] if token not in ENDS else []
        self.blocks[-1].enter_case(patterns)

    def _array(self, statement: list[str], *, skipped: bool) -> None:
        items: list[str] = []
        while self.position < len(self.tokens) and self.tokens[self.position] != ")":
            items += [self.tokens[self.position]] if self.tokens[self.position] != "\n" else []
            self.position += 1
        self.position += 1
        target = statement.pop().removeprefix("\0")
        if not skipped:
            self.scope.assign(target.rstrip("=").rstrip("+"), items, append=target.endswith("+="))

    def _join(self, end: str, statement: Sequence[str]) -> None:
        """Note whether the statement after `&&` or `||` runs, which depends on the tests before it."""
        if end not in ("&&", "||"):
            self.runs = self.status = True
            return
        if self.runs is not False and statement:
            tests = statement[0] in ("[", "[[")
            # A command is taken to succeed, unless there is one for its failure.
            succeeds = end == "&&" or all(map(_ASSIGNMENT.fullmatch, statement)) or None
            self.status = None if self.runs is None else truth(statement, self._value) if tests else succeeds
        self.runs = self.status if end == "&&" or self.status is None else not self.status

    def _value(self, word: str) -> str | None:
        """Return the value of a word; None if it depends on what is known only when the script runs."""
        self.scope.used.clear()
        text = from_environment(" ".join(_expanded(word.removeprefix("\0"), self.scope)), self.scope.environ)
        unknown = self.scope.used & (self.scope.uncertain | self.scope.arguments)
        return None if unknown or re.search(r"[$`]", text) else text.replace(LITERAL, "$")


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
    cleaned = tuple(word.replace(LITERAL, "$") for word in out)
    return [Command(cleaned, tuple(notes))] if cleaned else []


def _expanded(word: str, scope: _Scope) -> list[str]:
    """Fill in the variables of a word; an array becomes as many words as it holds."""
    array = re.fullmatch(rf"([${QUOTED}])\{{?(\w+)(?:\[[@*]\]\}})?\}}?", word)
    if array and array[2] in scope.values:
        scope.used.add(array[2])
        held = scope.values[array[2]]
        if "[" in word:
            return held
        split = array[1] != QUOTED and not any("$(" in value for value in held)
        return [part for value in held[:1] for part in value.split()] if split else held[:1]
    if re.fullmatch(rf"[${QUOTED}](?:[@*\d]|\{{[@*](:\w+)*\}})", word):
        scope.use_argument(word)
        return []
    return [_filled(word, scope)]


def _filled(text: str, scope: _Scope) -> str:
    """Fill in the variables, arithmetic and simple substitutions of a text."""
    out, position = "", 0
    while position < len(text):
        char = text[position]
        position += 1
        after = text[position : position + 1]
        if char not in ("$", QUOTED):
            out += char
        elif after in ("{", "("):
            close = closing(text, position)
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
    if name not in scope.values and name.isdigit():
        scope.use_argument(name)
        return ""
    if name not in scope.values:
        return f"${{oc.env:{name}}}"
    scope.used.add(name)
    return " ".join(scope.values[name])


def _parameter(inner: str, scope: _Scope) -> str:
    """Return what `${inner}` stands for."""
    match = _PARAMETER.fullmatch(inner)
    # OmegaConf's ${oc.env:NAME} looks like a parameter, but a shell's names have no dots.
    if match is None or (not match[2] and match[3].startswith(".")):
        return f"${{{inner}}}"
    name, operation, rest = match[1], match[2] or "", match[3]
    if operation in (":-", "-", ":=", "="):
        held, fallback = scope.values.get(name), _filled(_unquoted(rest), scope)
        found = _reference(name, fallback) if held is None else " ".join(held)
        if ":" in operation and not found:
            found = fallback
        elif ":" in operation and (empty := ENVIRONMENT.fullmatch(found)) and empty[3] == "":
            found = _reference(empty[1], fallback)
        if "=" in operation:
            scope.values[name] = [found]
        if held is not None:
            scope.used.add(name)
        return found
    value = _variable(name, scope)
    if name in scope.values and operation in (",,", "^^"):
        return value.lower() if operation == ",," else value.upper()
    if name in scope.values and operation[:1] in ("#", "%"):
        return _without(value, operation, _filled(_unquoted(rest), scope))
    return value


def _reference(name: str, fallback: str) -> str:
    """Return a reference to an environment variable with a fallback, or the fallback of an argument of the script."""
    if name.isdigit():
        return fallback
    plain = fallback
    while _PLAIN_REFERENCE.search(plain):
        plain = _PLAIN_REFERENCE.sub("", plain)
    if not _PLAIN.fullmatch(plain):
        # OmegaConf reads references in quotes first: quotes inside them are not escaped.
        parts = re.split(r"(\$\{.*\})", fallback)
        parts[::2] = [part.replace("'", "\\'") for part in parts[::2]]
        fallback = "'" + "".join(parts) + "'"
    return f"${{oc.env:{name},{fallback}}}"


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
    if choice := _CHOICE_OF_NPU.search(inner):
        return choice[1]  # rlsdk does not run on NPUs
    tokens = [token.lstrip("\0") for token in split(inner) if token != "--"]
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

    def value_of(name: str) -> int:
        scope.used.add(name)
        held = " ".join(scope.values.get(name, [scope.environ.get(name, "")]))
        return int(from_environment(held, scope.environ))

    return computed(from_environment(expression, scope.environ), value_of)


def _unquoted(text: str) -> str:
    """Remove quotes inside `${NAME:-...}`."""
    return "".join(split(text)) if re.search("['\"]", text) and not re.search(r"\s", text) else text.strip("'\"")
