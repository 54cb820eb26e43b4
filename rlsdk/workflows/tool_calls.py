"""Parsers of tool calls in model output, which is treated as data: parsed within limits and never executed."""

from __future__ import annotations

import ast
import json
import re
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import attrs

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
