"""Message formats that chat templates expect: names of thoughts, and requirements on tool calls."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import attrs

from rlsdk.renderers.probes import THOUGHT_KEYS
from rlsdk.types import Image, Message


def plain(message: Message) -> dict[str, Any]:
    """Return a message in OpenAI's format, with its thought under all names that templates use."""
    thought = dict.fromkeys(THOUGHT_KEYS, message.reasoning) if message.reasoning else {}
    if message.images:  # a template writes a placeholder, and needs no bytes
        parts = [{"type": "image"} if isinstance(p, Image) else {"type": "text", "text": p} for p in message.content]
        message = attrs.evolve(message, content=message.text)
        return {**message.as_json(), "content": parts} | thought
    return {**message.as_json(), "content": message.text} | thought


def images_of(messages: Sequence[Message]) -> list[Image]:
    """Return the images of messages, in order."""
    return [image for message in messages for image in message.images]


def with_thought_or_text(message: Mapping[str, Any]) -> dict[str, Any]:
    """Return a message with its text moved into its thought: gpt-oss refuses both together with a call."""
    thought = message.get(THOUGHT_KEYS[0])
    if not message.get("tool_calls") or not thought or not message["content"]:
        return dict(message)
    return {**message, "content": "", **dict.fromkeys(THOUGHT_KEYS, "\n".join((thought, message["content"])))}


def with_written_arguments(message: Mapping[str, Any]) -> dict[str, Any]:
    """Return a message with its calls' arguments as JSON text, which DeepSeek's templates require."""
    if not message.get("tool_calls"):
        return dict(message)
    calls = []
    for call in message["tool_calls"]:
        arguments = call["function"]["arguments"]
        written = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
        calls.append({**call, "function": {**call["function"], "arguments": written}})
    return {**message, "tool_calls": calls}
