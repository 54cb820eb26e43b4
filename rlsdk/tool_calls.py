"""Tool calls in text: how a model writes them, and how they are parsed, explained to it and formatted.

Model output is data: it is parsed within limits and never executed.
"""

from __future__ import annotations

import ast
import json
import re
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import attrs

from rlsdk.errors import OptionError, ValueFault
from rlsdk.plugins.importing import find

MAX_CHARACTERS = 16_384
"""Of an answer that is read; a longer one is not parsed."""


@attrs.frozen
class Call:
    """A tool call; `positional` arguments come from parsers whose syntax has them."""

    name: str
    arguments: Mapping[str, Any] = attrs.field(factory=dict)
    positional: tuple[Any, ...] = ()


@attrs.frozen
class Malformed:
    """An attempted call that cannot be parsed, with the reason."""

    reason: str


Parser = Callable[[str], list[Call | Malformed]]
"""Text of an answer -> the calls in it; none: it is the final answer."""


def hermes(text: str) -> list[Call | Malformed]:
    """Calls as `<tool_call>{"name": …, "arguments": {…}}</tool_call>`, one or several."""
    text = text.rpartition("</think>")[2]
    if "<tool_call>" not in text:
        return []
    if len(text) > MAX_CHARACTERS:
        return [_too_long(text)]
    bodies = text.split("<tool_call>")[1:]
    return [_hermes_call(body) for body in bodies]


def _hermes_call(body: str) -> Call | Malformed:
    inside, end, _ = body.partition("</tool_call>")
    if not end:
        return Malformed("<tool_call> is not closed by </tool_call>")
    read = _json(inside.strip())
    return read if isinstance(read, Malformed) else _object(read)


def as_json(text: str) -> list[Call | Malformed]:
    """The answer is an object `{"name": …, "arguments": {…}}`, or a list of such; a fence around it is left out."""
    text = text.rpartition("</think>")[2].strip()
    fenced = re.fullmatch(r"```(?:json)?\s*\n(.*?)\n?```", text, re.DOTALL)
    text = (fenced[1] if fenced else text).strip()
    if not re.match(r"\[?\s*\{", text):
        return []
    if len(text) > MAX_CHARACTERS:
        return [_too_long(text)]
    read = _json(text)
    if isinstance(read, Malformed):
        return [read]
    return [_object(each) for each in (read if isinstance(read, list) else [read])]


def pythonic(text: str) -> list[Call | Malformed]:
    """The answer is a call, `add(a=1, b=2)`, or a list of calls; arguments are literals."""
    text = text.rpartition("</think>")[2].strip()
    if not re.match(r"\[?\s*[A-Za-z_]\w*\(", text):
        return []
    if len(text) > MAX_CHARACTERS:
        return [_too_long(text)]
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # what the model wrote may be odd Python
            tree = ast.parse(text, mode="eval").body
        nodes = tree.elts if isinstance(tree, ast.List) else [tree]
        return [_python_call(node) for node in nodes]
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        return [Malformed(f"it is no Python call with literal arguments: {type(error).__name__}: {error}")]


def _python_call(node: ast.expr) -> Call | Malformed:
    if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Name):
        return Malformed("expected a call such as add(a=1, b=2), or a list of calls")
    if any(keyword.arg is None for keyword in node.keywords):
        return Malformed("** is not understood; name the arguments")
    named = {str(keyword.arg): ast.literal_eval(keyword.value) for keyword in node.keywords}
    return Call(node.func.id, named, tuple(ast.literal_eval(value) for value in node.args))


def _json(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        return Malformed(f"it is not JSON: {error}")


def _object(read: Any) -> Call | Malformed:
    if not isinstance(read, dict) or not isinstance(read.get("name"), str):
        return Malformed('expected {"name": NAME, "arguments": {…}}')
    arguments = read.get("arguments", read.get("parameters", {}))
    if not isinstance(arguments, dict):
        return Malformed(f"arguments: expected an object, got {json.dumps(arguments)[:100]}")
    return Call(read["name"], arguments)


def _too_long(text: str) -> Malformed:
    return Malformed(f"the answer has {len(text)} characters; at most {MAX_CHARACTERS} are read")


PARSERS: dict[str, tuple[Parser, str]] = {
    "hermes": (
        hermes,
        'To call one, answer <tool_call>{"name": NAME, "arguments": {…}}</tool_call>; several calls may follow each '
        "other.",
    ),
    "json": (
        as_json,
        'To call one, answer with nothing but {"name": NAME, "arguments": {…}}, or with a list of such objects.',
    ),
    "pythonic": (
        pythonic,
        "To call one, answer with nothing but NAME(argument=value, …), or with a list of such calls.",
    ),
}
"""Name -> parser, and what a policy is told of it where its chat template does not."""

Writer = Callable[[Sequence[tuple[str, Mapping[str, Any]]]], str]
"""(name, arguments) pairs -> the text of an answer that calls these."""


def _write_hermes(calls: Sequence[tuple[str, Mapping[str, Any]]]) -> str:
    return "\n".join(f"<tool_call>\n{_written(*call)}\n</tool_call>" for call in calls)


def _write_json(calls: Sequence[tuple[str, Mapping[str, Any]]]) -> str:
    objects = [_written(*call) for call in calls]
    return objects[0] if len(objects) == 1 else f"[{', '.join(objects)}]"


def _write_pythonic(calls: Sequence[tuple[str, Mapping[str, Any]]]) -> str:
    written = [f"{name}({', '.join(f'{k}={v!r}' for k, v in arguments.items())})" for name, arguments in calls]
    return written[0] if len(written) == 1 else f"[{', '.join(written)}]"


def _written(name: str, arguments: Mapping[str, Any]) -> str:
    return json.dumps({"name": name, "arguments": dict(arguments)}, ensure_ascii=False)


WRITERS: dict[str, Writer] = {"hermes": _write_hermes, "json": _write_json, "pythonic": _write_pythonic}
"""Name of a parser -> what writes what it reads."""


@attrs.frozen
class Dialect:
    """A syntax of tool calls.

    Attributes:
        parse: Parses the calls in the text of an answer.
        how: Instructions for a policy whose chat template does not explain the syntax; empty if unknown.
        write: Formats calls as text; `hermes` for custom parsers.
    """

    parse: Parser
    how: str = ""
    write: Writer = _write_hermes

    @classmethod
    def named(cls, name: str, component: str) -> Dialect:
        """Return the dialect named by an option `parser`: `hermes`, `json`, `pythonic` or `FILE.py:FUNCTION`.

        Args:
            name: Value of the option.
            component: Component that has the option.

        Raises:
            OptionError: The parser does not exist.
        """
        if name in PARSERS:
            return cls(*PARSERS[name], WRITERS[name])
        if ":" not in name:
            raise OptionError(
                component, [("parser", f"expected {', '.join(PARSERS)} or FILE.py:FUNCTION, got {name!r}")]
            )
        try:
            return cls(_guarded(find(name)))
        except ValueFault as error:
            raise OptionError(component, [("parser", str(error))]) from error

    def introduce(self, schemas: Sequence[Mapping[str, Any]]) -> str:
        """Describe the tools and the call syntax to a policy whose chat template does not."""
        told = "\n".join(json.dumps(schema["function"], ensure_ascii=False) for schema in schemas)
        return f"You may call these tools:\n{told}\n{self.how}".rstrip()


def _guarded(own: Callable[[str], Any]) -> Parser:
    def parse(text: str) -> list[Call | Malformed]:
        try:
            return [Call(called, dict(arguments)) for called, arguments in own(text)]
        except ValueError as error:
            return [Malformed(str(error))]

    return parse
