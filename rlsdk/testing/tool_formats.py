"""Round trip of tool calls through a renderer and the tool parsers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import attrs

from rlsdk.messages import ToolCall
from rlsdk.plugins import load
from rlsdk.rollout.codec import ChatTokenizer
from rlsdk.testing.findings import NotApplicable
from rlsdk.tool_calls import Call
from rlsdk.types import Message

_NAMES = ("rlsdk_lookup", "rlsdk_count")


def tools_of(conversation: Sequence[Message]) -> list[Mapping[str, Any]]:
    """Return schemas of two tools, with a text of a conversation in their descriptions."""
    parameters = {"type": "object", "properties": {"first": {"type": "string"}}, "required": ["first"]}
    return [
        {
            "type": "function",
            "function": {"name": name, "description": f"Look up {conversation[0].text}", "parameters": parameters},
        }
        for name in _NAMES
    ]


def round_trip_fault(codec: ChatTokenizer, conversation: Sequence[Message]) -> str | None:
    """Write calls with the texts of a conversation, and parse them with the parser for their format.

    Args:
        codec: Tokenizer with its renderer.
        conversation: Conversation whose texts become arguments; with several messages, two tools are called at once.

    Returns:
        What was parsed instead of the calls; None if they match.

    Raises:
        NotApplicable: The renderer does not write calls, or no parser knows their format.
    """
    if not codec.tool_form:
        raise NotApplicable("the template writes no tool calls, or no installed parser knows their format")
    texts = [" ".join(("text", message.text)) for message in conversation]
    calls = [Call(_NAMES[0], {"first": texts[0], "count": 3})]
    # Llama 3.1's template enforces one call at a time, gpt-oss's assumes it
    if len(texts) > 1 and codec.renderer.write_calls([(name, {"a": 1}) for name in _NAMES]):
        calls.append(Call(_NAMES[1], {"second": texts[-1]}))
    got = load("tool_parser", codec.tool_form).parse(
        codec.renderer.write_calls([(call.name, call.arguments) for call in calls])
    )
    return None if got == calls else f"the parser {codec.tool_form!r} read {got}, but the template wrote {calls}"


def with_calls(conversation: Sequence[Message]) -> list[Message]:
    """Return a conversation with a call before each tool result, in place of the answer's text."""
    made, answer = list(conversation), -1
    for i, message in enumerate(conversation):
        if message.role == "assistant":
            answer = i
        elif message.role == "tool" and answer >= 0:
            call = ToolCall(message.name, {}, f"call{i:05}")
            made[answer] = attrs.evolve(made[answer], content="", tool_calls=(*made[answer].tool_calls, call))
            made[i] = attrs.evolve(message, tool_call_id=call.id)
    return made
