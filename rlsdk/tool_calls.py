"""Tool calls in text: shared code of tool parsers, and the choice of one.

Model output is treated as data: parsed within limits and never executed.
"""

from __future__ import annotations

import ast
import json
import math
import reprlib
from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from typing import Any, Protocol

import attrs

from rlsdk.errors import OptionError, PluginError, UnknownComponentError, ValueFault
from rlsdk.plugins import load, names
from rlsdk.plugins.discovery import find

__all__ = ["MAX_CHARACTERS", "TOOL_STATE", "Call", "Dialect", "Malformed", "ToolParser", "is_users"]

TOOL_STATE = "tool_state"
"""Key in the metadata of a rollout's task: name of a tool class -> public attributes that its object had at the end."""

MAX_CHARACTERS = 65_536
"""Maximum characters of an answer that may contain calls; a longer one is refused."""

MAX_DEPTH = 100
"""Maximum nesting of a call's arguments."""

MAX_BITS = 4096
"""Maximum bits of an integer in a call's arguments; Python cannot write one of more than 4,300 digits as text."""


@attrs.frozen
class Call:
    """A tool call.

    Attributes:
        name: Name of the tool.
        arguments: Arguments by name.
        positional: Arguments without a name, if the syntax has them.
        texts: Arguments as written, if the syntax has no quotes, so that a tool that expects the text "2" gets it.
    """

    name: str
    arguments: Mapping[str, Any] = attrs.field(factory=dict)
    positional: tuple[Any, ...] = ()
    texts: Mapping[str, str] = attrs.field(factory=dict, eq=False, repr=False)

    def as_wanted(self, parameters: Mapping[str, Any]) -> Call:
        """Return the call with arguments as written where the tool expects text."""
        wanted = parameters.get("properties") if isinstance(parameters, Mapping) else None  # a client may send anything
        properties: Mapping[str, Any] = wanted if isinstance(wanted, Mapping) else {}
        texts = {
            name: text
            for name, text in self.texts.items()
            if _is_text(properties.get(name), text, self.arguments.get(name))
        }
        return attrs.evolve(self, arguments={**self.arguments, **texts}) if texts else self


def _is_text(schema: Any, text: str, value: Any) -> bool:
    """Return True if a schema expects the text as written rather than its parsed value."""
    if not isinstance(schema, Mapping):
        return False
    if isinstance(schema.get("enum"), list):
        return text in schema["enum"] and value not in schema["enum"]
    arms = schema.get("anyOf", schema.get("oneOf"))
    kinds = [arm.get("type") for arm in arms if isinstance(arm, Mapping)] if isinstance(arms, list) else []
    kinds += schema["type"] if isinstance(schema.get("type"), list) else [schema.get("type")] if not kinds else []
    if "string" not in kinds or not all(kind in ("string", "null") for kind in kinds):
        return False
    return value is not None or "null" not in kinds


@attrs.frozen
class Malformed:
    """An attempted call that cannot be parsed, with the reason."""

    reason: str


class ToolParser(Protocol):
    """Interface of a syntax of tool calls, as written by a family of models."""

    @property
    def instructions(self) -> str:
        """Sentence that tells a policy how to write a call, if its chat template does not."""
        ...

    @property
    def begins(self) -> tuple[str, ...]:
        """Texts that the first call may begin with; text before it is content. Empty: answers consist of calls only."""
        ...

    def parse(self, text: str) -> list[Call | Malformed]:
        """Parse the calls in an answer; never raises, even on truncated or hostile text.

        Args:
            text: Answer after its thoughts, without its end token; other special tokens appear as text.

        Returns:
            The calls in order; an attempt that cannot be parsed is `Malformed`; empty for a final answer.
        """
        ...

    def write(self, calls: Sequence[tuple[str, Mapping[str, Any]]]) -> str:
        """Write (name, arguments) pairs as an answer that `parse` can read."""
        ...


def beginnings(parser: ToolParser) -> tuple[str, ...]:
    """Return the texts that a first call may begin with; a plugin may write a single one as a plain string."""
    begins: Any = parser.begins
    return (begins,) if isinstance(begins, str) else tuple(begins)


def read_json(text: str) -> Any:
    """Parse JSON; return `Malformed` if it is not JSON."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        return Malformed(f"it is not JSON: {error}")


def read_call(read: Any) -> Call | Malformed:
    """Convert a parsed object `{"name": …, "arguments": {…}}`, or one with `parameters`, to a call."""
    if not isinstance(read, dict) or not isinstance(read.get("name"), str):
        return Malformed('expected {"name": NAME, "arguments": {…}}')
    return read_arguments(read["name"], read.get("arguments", read.get("parameters", {})))


def read_calls(text: str) -> list[Call | Malformed]:
    """Parse a JSON object as a call, or a list of them as several."""
    read = read_json(text)
    if isinstance(read, Malformed):
        return [read]
    return [read_call(each) for each in (read if isinstance(read, list) else [read])]


def read_arguments(name: str, arguments: Any) -> Call | Malformed:
    """Convert a name and parsed arguments to a call."""
    if isinstance(arguments, Malformed):
        return arguments
    if not isinstance(arguments, dict):
        return Malformed(f"arguments: expected an object, got {_brief(arguments)}")
    return Call(name, arguments)


def read_value(text: str) -> Any:
    """Parse an argument written as bare text: JSON or a similar Python literal, else the text itself."""
    for parse in (json.loads, ast.literal_eval):
        try:
            value = parse(text)
        except (ValueError, SyntaxError, RecursionError, MemoryError, TypeError):
            continue
        if not _not_json(value, 0):
            return value
    return text


def with_json_arguments(call: Call | Malformed) -> Call | Malformed:
    """Return a call if its arguments are JSON values, as required by templates, clients and the rollout store.

    Python literals may be sets, bytes, huge integers, or mappings with numeric keys. Python's JSON parser accepts NaN,
    reads 1e999 as infinity, and accepts values that are too deeply nested to be written again.
    """
    if isinstance(call, Malformed):
        return call
    fault = _not_json(call.arguments, 0) or _not_json(call.positional, 0)
    return Malformed(f"{call.name}: {fault}") if fault else call


def _not_json(value: Any, depth: int) -> str:
    """Return why a value is not JSON; empty if it is."""
    if depth > MAX_DEPTH:
        return f"its arguments are nested deeper than {MAX_DEPTH}"
    if isinstance(value, int) and value.bit_length() > MAX_BITS:
        return f"an integer has {value.bit_length()} bits; at most {MAX_BITS} are read"
    if value is None or isinstance(value, int | str) or (isinstance(value, float) and math.isfinite(value)):
        return ""
    if isinstance(value, Mapping):
        keys = [f"a key is {_brief(key)}; expected text" for key in value if not isinstance(key, str)]
        return next(chain(keys, filter(None, (_not_json(each, depth + 1) for each in value.values()))), "")
    if isinstance(value, list | tuple):
        return next(filter(None, (_not_json(each, depth + 1) for each in value)), "")
    return f"{_brief(value)} is not a JSON value"


def _brief(value: Any) -> str:
    try:
        return reprlib.repr(value)
    except ValueError:  # it contains an integer that is too large to be written
        return f"a value of type {type(value).__name__}"


def too_long(text: str) -> Malformed:
    """Return the error for an answer that is too long to parse."""
    return Malformed(f"the answer has {len(text)} characters; at most {MAX_CHARACTERS} are read")


def blocks(text: str, begin: str, end: str, read: Callable[[str], Call | Malformed]) -> list[Call | Malformed]:
    """Parse each block between two markers, after the thoughts."""
    text = text.rpartition("</think>")[2]
    if begin not in text:
        return []
    if len(text) > MAX_CHARACTERS:
        return [too_long(text)]
    calls = []
    for block in text.split(begin)[1:]:
        body, closed, _ = block.partition(end)
        calls.append(read(body) if closed else Malformed(f"{begin} is not closed by {end}"))
    return calls


def read_object_after(name: str, text: str) -> Call | Malformed:
    """Parse the first JSON object in a text as the arguments of a call."""
    at = text.find("{")
    if at < 0:
        return Malformed(f"{name}: expected a JSON object of arguments")
    try:
        read, _ = json.JSONDecoder().raw_decode(text[at:])
    except (ValueError, RecursionError) as error:
        return Malformed(f"{name}: its arguments are not JSON: {error}")
    return read_arguments(name, read)


def as_json(value: Any) -> str:
    """Write a value as JSON."""
    return json.dumps(dict(value) if isinstance(value, Mapping) else value, ensure_ascii=False)


def call_id(answer: int, index: int) -> str:
    """Return the id of a call in a conversation: nine letters and digits, as Mistral's templates require.

    Args:
        answer: Number of the answer in its conversation.
        index: Position of the call in the answer.
    """
    return f"call{answer % 100:02}{index % 1000:03}"


def before_mark(text: str, marks: Sequence[str]) -> str:
    """Return text up to the first of the marks, or up to where one may begin at the end of the text."""
    found = len(text)
    for mark in marks:
        at = text.find(mark)
        if at < 0:
            longest = range(min(len(mark) - 1, len(text)), 0, -1)
            at = len(text) - next((n for n in longest if text.endswith(mark[:n])), 0)
        found = min(found, at)
    return text[:found]


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
