"""Typed Python functions as tools: their JSON schemas, and checked arguments."""

from __future__ import annotations

import inspect
import json
import re
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, get_args, get_origin

import attrs

from rlsdk.docstrings import documented
from rlsdk.errors import ValueFault
from rlsdk.options import MISSING, Option, check_options
from rlsdk.tool_calls import Call

_PLAIN = {str: "string", int: "integer", float: "number", bool: "boolean", type(None): "null"}


class WrongCallError(ValueError):
    """A call has wrong arguments; the message is shown to the policy."""


@attrs.frozen
class Tool:
    """A function, sync or async, that the policy may call; its description is the first paragraph of its docstring."""

    name: str
    function: Callable[..., Any]
    description: str
    parameters: tuple[Option, ...]

    @classmethod
    def of(cls, function: Callable[..., Any]) -> Tool:
        """Create a tool from a function.

        Raises:
            ValueFault: A parameter is untyped, has a type that JSON cannot express, or cannot be passed by name.
        """
        name = getattr(function, "__name__", type(function).__name__)
        doc = inspect.getdoc(function) or ""
        notes = documented(doc)
        try:
            hints = typing.get_type_hints(function)
        except Exception as error:  # an annotation is code that may raise anything
            raise ValueFault(f"tool {name!r}: its annotations cannot be read: {error}") from error
        found = []
        for p in inspect.signature(function).parameters.values():
            if p.kind in (p.VAR_POSITIONAL, p.VAR_KEYWORD, p.POSITIONAL_ONLY) or p.name not in hints:
                raise ValueFault(f"tool {name!r}: parameter {p} must be named and typed, such as `{p.name}: str`")
            default = MISSING if p.default is p.empty else p.default
            found.append(Option(p.name, hints[p.name], default, notes.get(p.name, "")))
        tool = cls(name, function, " ".join(doc.split("\n\n")[0].split()), tuple(found))
        _ = tool.schema  # raises on types that it cannot express
        return tool

    @property
    def schema(self) -> dict[str, Any]:
        """JSON schema of the tool, for chat templates and servers."""
        properties = {}
        for p in self.parameters:
            try:
                properties[p.name] = _schema(p.type)
            except ValueFault as error:
                raise ValueFault(f"tool {self.name!r}, parameter {p.name!r}: {error}") from error
            if p.help:
                properties[p.name]["description"] = p.help
            if not p.required:
                properties[p.name]["default"] = p.default
        required = [p.name for p in self.parameters if p.required]
        parameters = {"type": "object", "properties": properties, "required": required}
        function = {"name": self.name, "description": self.description, "parameters": parameters}
        return {"type": "function", "function": function}

    def arguments(self, call: Call) -> Mapping[str, Any]:
        """Convert the arguments of a call to their declared types.

        Raises:
            WrongCallError: Arguments are wrong; the message lists all faults.
        """
        wanted = call.as_wanted(self.schema["function"]["parameters"])
        given = named(self.name, [p.name for p in self.parameters], wanted)
        values, faults = check_options(self.parameters, given)
        if faults:
            listed = "; ".join(f"{name}: {text}" for name, text in faults)
            raise WrongCallError(f"{self.name}: {listed.replace('unknown option', 'unknown argument')}")
        return values


def named(tool: str, names: Sequence[str], call: Call) -> dict[str, Any]:
    """Convert all arguments of a call to named ones, given the parameters in order.

    Raises:
        WrongCallError: There are too many arguments, or one is given twice.
    """
    if len(call.positional) > len(names):
        raise WrongCallError(f"{tool} takes {len(names)} arguments, {len(call.positional)} were given")
    given = dict(zip(names, call.positional, strict=False))
    if twice := [name for name in given if name in call.arguments]:
        raise WrongCallError(f"{tool}: {', '.join(twice)}: given twice")
    return {**given, **call.arguments}


def as_text(result: Any, limit: int) -> str:
    """Format a tool's result for the policy, truncated: text unchanged, anything else as JSON if possible.

    Raises:
        TypeError: The result has no text but its type and address, such as an image.
    """
    try:
        text = result if isinstance(result, str) else json.dumps(result, ensure_ascii=False)
    except (TypeError, ValueError):
        text = str(result)
        if re.fullmatch(r"<.* at 0x[0-9a-fA-F]+>", text):
            kind = type(result)
            raise TypeError(f"the tool returned a {kind.__module__}.{kind.__qualname__}, which has no text") from None
    return text if len(text) <= limit else f"{text[:limit]}… ({len(text) - limit} characters left out)"


def _schema(kind: Any) -> dict[str, Any]:
    """Return the JSON schema of a type."""
    origin, inner = get_origin(kind), get_args(kind)
    if kind in _PLAIN:
        return {"type": _PLAIN[kind]}
    if kind is Any:
        return {}
    if origin is Literal:
        return {"enum": list(inner)}
    if origin in (typing.Union, types.UnionType):
        return {"anyOf": [_schema(arm) for arm in inner]}
    if kind in (list, dict):
        return {"type": "array" if kind is list else "object"}
    if origin in (list, Sequence):
        return {"type": "array", "items": _schema(inner[0])}
    if origin in (dict, Mapping) and inner[0] is str:
        return {"type": "object", "additionalProperties": _schema(inner[1])}
    raise ValueFault(f"JSON cannot express {kind!r}; use str, int, float, bool, list, dict, Literal or a union")
