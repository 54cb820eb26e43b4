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
from rlsdk.tool_calls import formats
from rlsdk.tool_calls.calls import MAX_CHARACTERS, Call, Malformed, Parser, Writer, read_call, read_json, too_long

__all__ = [
    "IN_TAGS",
    "MAX_CHARACTERS",
    "PARSERS",
    "WRITERS",
    "Call",
    "Dialect",
    "Malformed",
    "Parser",
    "Writer",
    "as_json",
    "hermes",
    "pythonic",
]


def hermes(text: str) -> list[Call | Malformed]:
    """Calls as `<tool_call>{"name": …, "arguments": {…}}</tool_call>`, one or several."""
    text = text.rpartition("</think>")[2]
    if "<tool_call>" not in text:
        return []
    if len(text) > MAX_CHARACTERS:
        return [too_long(text)]
    bodies = text.split("<tool_call>")[1:]
    return [_hermes_call(body) for body in bodies]


def _hermes_call(body: str) -> Call | Malformed:
    inside, end, _ = body.partition("</tool_call>")
    if not end:
        return Malformed("<tool_call> is not closed by </tool_call>")
    read = read_json(inside.strip())
    return read if isinstance(read, Malformed) else read_call(read)


def as_json(text: str) -> list[Call | Malformed]:
    """The answer is an object `{"name": …, "arguments": {…}}`, or a list of such; a fence around it is left out."""
    text = text.rpartition("</think>")[2].strip()
    fenced = re.fullmatch(r"```(?:json)?\s*\n(.*?)\n?```", text, re.DOTALL)
    text = (fenced[1] if fenced else text).strip()
    if not re.match(r"\[?\s*\{", text):
        return []
    if len(text) > MAX_CHARACTERS:
        return [too_long(text)]
    read = read_json(text)
    if isinstance(read, Malformed):
        return [read]
    return [read_call(each) for each in (read if isinstance(read, list) else [read])]


def pythonic(text: str) -> list[Call | Malformed]:
    """The answer is a call, `add(a=1, b=2)`, or a list of calls; arguments are literals."""
    text = re.sub(r"<\|tool_call_(?:start|end)\|>", "", text.rpartition("</think>")[2]).strip()
    if not re.match(r"\[?\s*[A-Za-z_]\w*\(", text):
        return []
    if len(text) > MAX_CHARACTERS:
        return [too_long(text)]
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
    "qwen3_coder": (
        formats.qwen3_coder,
        "To call one, answer <tool_call><function=NAME><parameter=KEY>VALUE</parameter></function></tool_call>.",
    ),
    "glm": (
        formats.glm,
        "To call one, answer <tool_call>NAME<arg_key>KEY</arg_key><arg_value>VALUE</arg_value></tool_call>.",
    ),
    "harmony": (formats.harmony, "To call one, write to=functions.NAME and a JSON object of arguments."),
    "deepseek": (
        formats.deepseek,
        "To call one, answer <｜tool▁call▁begin｜>NAME<｜tool▁sep｜>{…}<｜tool▁call▁end｜>.",
    ),
    "mistral": (formats.mistral, 'To call one, answer [TOOL_CALLS][{"name": NAME, "arguments": {…}}].'),
    "llama3": (formats.llama3, 'To call one, answer with nothing but {"name": NAME, "parameters": {…}}.'),
}
"""Name -> parser, and what a policy is told of it where its chat template does not."""


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


WRITERS: dict[str, Writer] = {
    "hermes": _write_hermes,
    "json": _write_json,
    "pythonic": _write_pythonic,
    "qwen3_coder": formats.write_qwen3_coder,
    "glm": formats.write_glm,
    "harmony": formats.write_harmony,
    "deepseek": formats.write_deepseek,
    "mistral": formats.write_mistral,
    "llama3": formats.write_llama3,
}
"""Name of a parser -> what writes what it reads."""

IN_TAGS = frozenset({hermes, formats.qwen3_coder, formats.glm})
"""Parsers of calls that begin with `<tool_call>`: what stands before the first one is the answer's content."""


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
        """Return the dialect named by an option `parser`: a key of `PARSERS`, or `FILE.py:FUNCTION`.

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
