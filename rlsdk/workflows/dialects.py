"""Syntaxes of tool calls: parsing them, explaining them to a model, and writing them."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import attrs

from rlsdk.errors import OptionError, ValueFault
from rlsdk.plugins.importing import find
from rlsdk.workflows.tool_calls import PARSERS, Call, Malformed, Parser

Writer = Callable[[Sequence[tuple[str, Mapping[str, Any]]]], str]
"""(name, arguments) pairs -> the text of an answer that calls these."""


def _hermes(calls: Sequence[tuple[str, Mapping[str, Any]]]) -> str:
    return "\n".join(f"<tool_call>\n{_object(*call)}\n</tool_call>" for call in calls)


def _json(calls: Sequence[tuple[str, Mapping[str, Any]]]) -> str:
    objects = [_object(*call) for call in calls]
    return objects[0] if len(objects) == 1 else f"[{', '.join(objects)}]"


def _pythonic(calls: Sequence[tuple[str, Mapping[str, Any]]]) -> str:
    written = [f"{name}({', '.join(f'{k}={v!r}' for k, v in arguments.items())})" for name, arguments in calls]
    return written[0] if len(written) == 1 else f"[{', '.join(written)}]"


def _object(name: str, arguments: Mapping[str, Any]) -> str:
    return json.dumps({"name": name, "arguments": dict(arguments)}, ensure_ascii=False)


WRITERS: dict[str, Writer] = {"hermes": _hermes, "json": _json, "pythonic": _pythonic}
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
    write: Writer = _hermes

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
