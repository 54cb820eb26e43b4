"""Calls that were found in an answer, and what all parsers share."""

from __future__ import annotations

import ast
import json
from collections.abc import Callable, Mapping, Sequence
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
Writer = Callable[[Sequence[tuple[str, Mapping[str, Any]]]], str]
"""(name, arguments) pairs -> the text of an answer that calls these."""


def read_json(text: str) -> Any:
    """Parse JSON; what is not JSON gives `Malformed`."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        return Malformed(f"it is not JSON: {error}")


def read_call(read: Any) -> Call | Malformed:
    """Take a parsed object `{"name": …, "arguments": {…}}`, or one with `parameters`, as a call."""
    if not isinstance(read, dict) or not isinstance(read.get("name"), str):
        return Malformed('expected {"name": NAME, "arguments": {…}}')
    return read_arguments(read["name"], read.get("arguments", read.get("parameters", {})))


def read_arguments(name: str, arguments: Any) -> Call | Malformed:
    """Take a name and parsed arguments as a call."""
    if isinstance(arguments, Malformed):
        return arguments
    if not isinstance(arguments, dict):
        return Malformed(f"arguments: expected an object, got {json.dumps(arguments)[:100]}")
    return Call(name, arguments)


def read_value(text: str) -> Any:
    """Read an argument that is written as bare text: JSON or a Python literal if it is one, else the text itself."""
    for parse in (json.loads, ast.literal_eval):
        try:
            return parse(text)
        except (ValueError, SyntaxError, RecursionError, MemoryError, TypeError):
            continue
    return text


def too_long(text: str) -> Malformed:
    """Return the refusal of an answer that is too long to parse."""
    return Malformed(f"the answer has {len(text)} characters; at most {MAX_CHARACTERS} are read")
