"""Tool calls in text: shared code of tool parsers, and the choice of one.

Model output is treated as data: parsed within limits and never executed.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import attrs

from rlsdk.errors import OptionError, PluginError, UnknownComponentError, ValueFault
from rlsdk.plugins import load, names
from rlsdk.plugins.discovery import find
from rlsdk.tool_calls.calls import MAX_CHARACTERS, Call, Malformed, ToolParser, beginnings

__all__ = ["MAX_CHARACTERS", "Call", "Dialect", "Malformed", "ToolParser", "is_users"]

Parse = Callable[[str], list[Call | Malformed]]
"""Text of an answer -> its calls; none if it is the final answer."""
Write = Callable[[Sequence[tuple[str, Mapping[str, Any]]]], str]
"""(name, arguments) pairs -> text of an answer that makes these calls."""


def _as_objects(calls: Sequence[tuple[str, Mapping[str, Any]]]) -> str:
    return "\n".join(json.dumps({"name": name, "arguments": dict(given)}, ensure_ascii=False) for name, given in calls)


@attrs.frozen
class Dialect:
    """A syntax of tool calls, from a `tool_parser` component or a user's function.

    Attributes:
        parse: Parses the calls in the text of an answer.
        how: Instructions for a policy whose chat template does not explain the syntax; empty if unknown.
        write: Formats calls as text; by default, one JSON object per line.
        begins: Texts that a first call may begin with, as in `ToolParser`.
    """

    parse: Parse
    how: str = ""
    write: Write = _as_objects
    begins: tuple[str, ...] = ()

    @property
    def instructions(self) -> str:
        """Instructions for the policy; the same as `how`, under the name used by `ToolParser`."""
        return self.how

    @classmethod
    def of(cls, parser: ToolParser) -> Dialect:
        """Return the dialect of a `tool_parser` component."""
        return cls(parser.parse, parser.instructions, parser.write, beginnings(parser))

    @classmethod
    def named(cls, name: str, component: str) -> Dialect:
        """Return the dialect named by an option `parser`: a component `tool_parser`, or `FILE.py:FUNCTION`.

        Args:
            name: Value of the option.
            component: Component with the option.

        Raises:
            OptionError: The parser does not exist.
        """
        try:
            return cls(_guarded(find(name))) if ":" in name else cls.of(load("tool_parser", name))
        except ValueFault as error:
            raise OptionError(component, [("parser", str(error))]) from error
        except UnknownComponentError as error:
            known = ", ".join(names("tool_parser"))
            expected = f"expected {known} or FILE.py:FUNCTION, got {name!r}"
            raise OptionError(component, [("parser", expected)]) from error
        except PluginError as error:
            raise OptionError(component, [("parser", str(error))]) from error

    def introduce(self, schemas: Sequence[Mapping[str, Any]]) -> str:
        """Describe the tools and the call syntax to a policy whose chat template does not."""
        functions = "\n".join(json.dumps(schema["function"], ensure_ascii=False) for schema in schemas)
        return f"You may call these tools:\n{functions}\n{self.how}".rstrip()


def is_users(parser: str | None) -> bool:
    """Return True if an option `parser` names user code: a function in a file, or a plugin's parser."""
    return parser is not None and (":" in parser or "/" in parser)


def _guarded(own: Callable[[str], Any]) -> Parse:
    def parse(text: str) -> list[Call | Malformed]:
        try:
            return [Call(called, dict(arguments)) for called, arguments in own(text)]
        except ValueError as error:
            return [Malformed(str(error))]

    return parse
