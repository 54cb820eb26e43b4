"""Messages of a conversation, and the base of frozen values."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Any, Literal

import attrs

from rlsdk.errors import ValueFault

Role = Literal["system", "user", "assistant", "tool"]


def frozen_mapping(value: Mapping[str, Any] | None) -> Mapping[str, Any]:
    """Return a read-only copy of a mapping; None is an empty one."""
    return value if isinstance(value, MappingProxyType) else MappingProxyType(dict(value or {}))


class Frozen:
    """Pickling for classes with read-only mappings (which do not pickle) and arrays (whose flag a pickle forgets)."""

    __slots__ = ()

    def __getstate__(self) -> dict[str, Any]:
        state = {}
        for field in attrs.fields(type(self)):  # type: ignore[arg-type]
            value = getattr(self, field.name)
            state[field.name] = dict(value) if field.converter is frozen_mapping else value
        return state

    def __setstate__(self, state: Mapping[str, Any]) -> None:
        for field in attrs.fields(type(self)):  # type: ignore[arg-type]
            value = state[field.name]
            if field.converter is frozen_mapping or (field.converter and hasattr(value, "setflags")):
                value = field.converter(value)
            object.__setattr__(self, field.name, value)


@attrs.frozen(slots=False, getstate_setstate=False)
class ToolCall(Frozen):
    """A call of a tool in a message of the assistant.

    Attributes:
        name: Name of the tool.
        arguments: Its arguments by name, read-only.
        id: Id by which the result refers to the call; empty if none was given.
    """

    name: str
    arguments: Mapping[str, Any] = attrs.field(factory=dict, converter=frozen_mapping, hash=False)
    id: str = ""


def _tool_calls(value: Iterable[ToolCall | Mapping[str, Any]]) -> tuple[ToolCall, ...]:
    return tuple(call if isinstance(call, ToolCall) else _read_tool_call(call) for call in value or ())


def _read_tool_call(value: Mapping[str, Any]) -> ToolCall:
    function = value.get("function", value)
    arguments = function.get("arguments") or {}
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except ValueError:
            arguments = None
    if not isinstance(arguments, Mapping):
        given = f"{function['arguments']!r:.100}"
        raise ValueFault(f"tool call {function.get('name')!r}: arguments are {given}; expected an object")
    return ToolCall(function["name"], arguments, value.get("id") or "")


@attrs.frozen
class Message:
    """One message of a conversation.

    Of an answer that the policy wrote, `content` is the text as it was sampled, thoughts and calls included;
    `reasoning` and `tool_calls` are what was read in it. Of any other message they stand beside the content.

    Attributes:
        role: system, user, assistant or tool.
        content: The text.
        name: Name of the tool whose result it is.
        tool_calls: Calls of tools that the assistant made.
        tool_call_id: Id of the call whose result it is.
        reasoning: Thought of the assistant before its answer.
        prompt: Set on messages of the assistant: True for one that was given (a few-shot answer, an earlier turn of the
            data), False for one that the policy wrote. None is settled by `Rollout`. Equality does not depend on it.
    """

    role: Role
    content: str
    name: str = ""
    tool_calls: tuple[ToolCall, ...] = attrs.field(default=(), converter=_tool_calls, kw_only=True)
    tool_call_id: str = attrs.field(default="", kw_only=True)
    reasoning: str = attrs.field(default="", kw_only=True)
    prompt: bool | None = attrs.field(default=None, eq=False, kw_only=True)

    def as_json(self) -> dict[str, Any]:
        """Return the message in the form of OpenAI's API, as JSON values; what is empty is left out."""
        calls = [
            {"id": c.id, "type": "function", "function": {"name": c.name, "arguments": dict(c.arguments)}}
            for c in self.tool_calls
        ]
        more = {"name": self.name, "tool_calls": calls, "tool_call_id": self.tool_call_id, "reasoning": self.reasoning}
        return {"role": self.role, "content": self.content, **{key: value for key, value in more.items() if value}}

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Message:
        """Read a message in the form of OpenAI's API; arguments of calls may be an object or its JSON.

        Raises:
            ValueFault: The arguments of a call are neither.
        """
        return cls(
            value["role"],
            value.get("content") or "",
            value.get("name") or "",
            tool_calls=value.get("tool_calls") or (),
            tool_call_id=value.get("tool_call_id") or "",
            reasoning=value.get("reasoning") or value.get("reasoning_content") or "",
        )
