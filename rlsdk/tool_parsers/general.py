"""Tool call syntaxes shared by many models: JSON in tags, bare JSON, Python calls."""

from __future__ import annotations

import ast
import re
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

from rlsdk.marks import tool_parser
from rlsdk.tool_calls import (
    MAX_CHARACTERS,
    Call,
    Malformed,
    as_json,
    blocks,
    read_call,
    read_calls,
    read_json,
    too_long,
)

_JSON_WORDS = {"true": True, "false": False, "null": None}
Pairs = Sequence[tuple[str, Mapping[str, Any]]]


def _objects(calls: Pairs) -> list[str]:
    return [as_json({"name": name, "arguments": dict(arguments)}) for name, arguments in calls]


@tool_parser("hermes")
class Hermes:
    """Calls written `<tool_call>{"name": …, "arguments": {…}}</tool_call>`, one or more: Qwen2.5, Qwen3, Hermes."""

    begins = ("<tool_call>",)
    instructions = (
        'To call one, answer <tool_call>{"name": NAME, "arguments": {…}}</tool_call>; several calls may follow each '
        "other."
    )

    def parse(self, text: str) -> list[Call | Malformed]:
        """Parse calls in tags."""
        return blocks(text, "<tool_call>", "</tool_call>", _read_object)

    def write(self, calls: Pairs) -> str:
        """Write calls in tags."""
        return "\n".join(f"<tool_call>\n{call}\n</tool_call>" for call in _objects(calls))


def _read_object(body: str) -> Call | Malformed:
    read = read_json(body.strip())
    return read if isinstance(read, Malformed) else read_call(read)


@tool_parser("json")
class Json:
    """The answer is an object `{"name": …, "arguments": {…}}`, or a list of them; a surrounding fence is ignored."""

    begins = ()
    instructions = (
        'To call one, answer with nothing but {"name": NAME, "arguments": {…}}, or with a list of such objects.'
    )

    def parse(self, text: str) -> list[Call | Malformed]:
        """Parse an answer that is JSON."""
        text = text.rpartition("</think>")[2].strip()
        fenced = re.fullmatch(r"```(?:json)?\s*\n(.*?)\n?```", text, re.DOTALL)
        text = (fenced[1] if fenced else text).strip()
        if not re.match(r"\[?\s*\{", text):
            return []
        if len(text) > MAX_CHARACTERS:
            return [too_long(text)]
        return read_calls(text)

    def write(self, calls: Pairs) -> str:
        """Write one call as an object, several as a list."""
        objects = _objects(calls)
        return objects[0] if len(objects) == 1 else f"[{', '.join(objects)}]"


@tool_parser("pythonic")
class Pythonic:
    """The answer is a call, `add(a=1, b=2)`, or a list of calls, with literal arguments: LFM2, Llama 4."""

    begins = ()
    instructions = "To call one, answer with nothing but NAME(argument=value, …), or with a list of such calls."

    def parse(self, text: str) -> list[Call | Malformed]:
        """Parse an answer that is a Python expression, without evaluating it."""
        text = re.sub(r"<\|tool_call_(?:start|end)\|>", "", text.rpartition("</think>")[2]).strip()
        if not re.match(r"\[?\s*[A-Za-z_]\w*\(", text):
            return []
        if len(text) > MAX_CHARACTERS:
            return [too_long(text)]
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # the model's text may be odd Python
                tree = _JsonWords().visit(ast.parse(text, mode="eval")).body
            nodes = tree.elts if isinstance(tree, ast.List) else [tree]
            return [_python_call(node) for node in nodes]
        except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError) as error:  # TypeError: {[1]: 2}
            return [Malformed(f"it is not a Python call with literal arguments: {type(error).__name__}: {error}")]

    def write(self, calls: Pairs) -> str:
        """Write one call as an expression, several as a list."""
        written = [f"{name}({', '.join(f'{k}={v!r}' for k, v in arguments.items())})" for name, arguments in calls]
        return written[0] if len(written) == 1 else f"[{', '.join(written)}]"


class _JsonWords(ast.NodeTransformer):
    """Reads `true`, `false` and `null` as JSON does: LFM2.5's template writes nested arguments as JSON."""

    def visit_Name(self, node: ast.Name) -> ast.expr:
        """Replace a name that is a JSON word by its value."""
        return ast.Constant(_JSON_WORDS[node.id]) if node.id in _JSON_WORDS else node


def _python_call(node: ast.expr) -> Call | Malformed:
    if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Name):
        return Malformed("expected a call such as add(a=1, b=2), or a list of calls")
    if any(keyword.arg is None for keyword in node.keywords):
        return Malformed("** is not understood; name the arguments")
    named = {str(keyword.arg): _literal(keyword.value) for keyword in node.keywords}
    return Call(node.func.id, named, tuple(map(_literal, node.args)))


def _literal(node: ast.expr) -> Any:
    try:
        return ast.literal_eval(node)
    except ValueError as error:  # its text holds an address in memory, and would differ from run to run
        raise ValueError(f"{ast.unparse(node)[:80]!r} is not a literal") from error
