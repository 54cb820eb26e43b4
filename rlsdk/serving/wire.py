"""Parse requests in OpenAI's format, for chat completions and completions, strictly and with limits."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import cached_property
from typing import Any

import attrs

from rlsdk.serving.messages import (
    APIError,
    ChatMessage,
    read_flag,
    read_list,
    read_message,
    read_number,
    read_object,
    read_tool,
    read_top_logprobs,
)
from rlsdk.types import Message, ToolCall

MAX_CHOICES = 128
MAX_ANSWERS = 1024
MAX_MESSAGES = 4096
MAX_STOPS = 64
MAX_STOP_CHARACTERS = 1024
MAX_SEED = 2**63 - 1


@attrs.frozen(kw_only=True)
class GenerationRequest:
    """Fields that both kinds of requests share.

    Attributes:
        n: Number of answers to each prompt.
        max_tokens: Maximum tokens of an answer; None for the server's setting.
        stop: Stop strings.
        sampling: Fields of `contracts.Sampling` that the request sets.
        seed: Seed of the request.
        stream: Send tokens as they are sampled.
        stream_usage: Send token counts at the end of a stream.
        model: Model name in the request.
        top_logprobs: Number of most likely tokens to report at each position; None for no logprobs.
        return_token_ids: Return token ids, as vLLM does, and the versions of the weights that sampled them.
    """

    n: int = 1
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    sampling: Mapping[str, Any] = attrs.field(factory=dict)
    seed: int | None = None
    stream: bool = False
    stream_usage: bool = False
    model: str = ""
    top_logprobs: int | None = None
    return_token_ids: bool = False


@attrs.frozen(kw_only=True)
class ChatCompletionRequest(GenerationRequest):
    """A request for the next message of a conversation; if the last one is the assistant's, it is continued."""

    messages: tuple[ChatMessage, ...]
    tools: tuple[Mapping[str, Any], ...] = ()
    calling: bool = False

    @property
    def prefill(self) -> str:
        """Beginning of the answer, given by the client."""
        return self.messages[-1].content if self.messages[-1].role == "assistant" else ""

    @property
    def characters(self) -> int:
        """Total number of characters in all messages."""
        return sum(len(message.content) for message in self.messages)

    @cached_property
    def _tool_names(self) -> Mapping[str, str]:
        """Name of the tool of each call in the conversation, by the call's id."""
        return {call.id: call.name for message in self.messages for call in message.calls}

    def as_message(self, message: ChatMessage) -> Message:
        """Convert a message for the renderer; a tool result gets its tool's name from the call that it answers."""
        name = (message.name or self._tool_names.get(message.call_id, "")) if message.role == "tool" else ""
        calls = [ToolCall(call.name, _arguments(call.arguments), call.id) for call in message.calls]
        return Message(
            message.role,
            message.parts or message.content,
            name,
            tool_calls=calls,
            tool_call_id=message.call_id,
            reasoning=message.reasoning,
        )


def _arguments(text: str) -> Mapping[str, Any]:
    """Return the arguments of a call; a text that is not a JSON object is returned under the key `arguments`."""
    try:
        read = json.loads(text or "{}")
    except (ValueError, RecursionError):
        read = None
    return read if isinstance(read, dict) else {"arguments": text}


@attrs.frozen(kw_only=True)
class CompletionRequest(GenerationRequest):
    """A request to continue texts or token ids."""

    prompts: tuple[str | tuple[int, ...], ...]


def read_chat(body: Any, *, strict: bool = False) -> ChatCompletionRequest:
    """Parse a `/chat/completions` request; if strict, reject unsupported sampling fields instead of ignoring them."""
    fields = read_object(body)
    given = read_list(fields, "messages")
    if len(given) > MAX_MESSAGES:
        raise APIError(f"messages: at most {MAX_MESSAGES}, got {len(given)}", param="messages")
    messages = tuple(read_message(each, f"messages[{i}]") for i, each in enumerate(given))
    if not messages:
        raise APIError("messages: expected at least one message, got none", param="messages")
    _check_continued(fields, messages[-1])
    tools = tuple(read_tool(each, f"tools[{i}]") for i, each in enumerate(read_list(fields, "tools", optional=True)))
    wants, count = read_flag(fields, "logprobs"), read_number(fields, "top_logprobs", int, None)
    if count is not None and not wants:
        raise APIError("top_logprobs: needs logprobs: true", param="top_logprobs")
    return ChatCompletionRequest(
        messages=messages,
        tools=tools,
        calling=bool(tools) and fields.get("tool_choice") != "none",
        top_logprobs=read_top_logprobs("top_logprobs", count or 0) if wants else None,
        **_common(fields, strict=strict),
    )


def _check_continued(fields: Mapping[str, Any], last: ChatMessage) -> None:
    """Reject a request whose last message and `continue_final_message` contradict each other."""
    prefilled, asked = last.role == "assistant", fields.get("continue_final_message")
    if prefilled and (last.calls or not last.content):
        raise APIError(
            "messages: the last message is the assistant's and will be continued, so it needs text and no tool calls",
            param="messages",
        )
    if asked not in (None, prefilled):
        found = "it is the assistant's, and is always continued" if prefilled else f"it is the {last.role}'s"
        raise APIError(f"continue_final_message: {asked!r} does not fit the last message: {found}", param="messages")


def read_completion(body: Any, *, strict: bool = False) -> CompletionRequest:
    """Parse a `/completions` request, see `read_chat`."""
    fields = read_object(body)
    common = _common(fields, strict=strict)
    prompts = _prompts(fields.get("prompt"))
    if len(prompts) * common["n"] > MAX_ANSWERS:
        raise APIError(
            f"prompt: {len(prompts)} prompts with n={common['n']} need {len(prompts) * common['n']} answers; a request "
            f"may ask for at most {MAX_ANSWERS}",
            param="prompt",
        )
    count = read_number(fields, "logprobs", int, None)
    count = None if count is None else read_top_logprobs("logprobs", count)
    return CompletionRequest(prompts=prompts, top_logprobs=count, **common)


def _prompts(given: Any) -> tuple[str | tuple[int, ...], ...]:
    many = isinstance(given, list) and bool(given) and isinstance(given[0], str | list)
    prompts = given if many else [given]
    if len(prompts) > MAX_ANSWERS:
        raise APIError(f"prompt: at most {MAX_ANSWERS} prompts, got {len(prompts)}", param="prompt")
    read: list[str | tuple[int, ...]] = []
    for prompt in prompts:
        ids = isinstance(prompt, list) and all(type(i) is int and 0 <= i <= MAX_SEED for i in prompt)
        if not prompt or not (isinstance(prompt, str) or ids):
            raise APIError(
                "prompt: expected a text, a list of token ids, or a list of these; none may be empty", param="prompt"
            )
        read.append(prompt if isinstance(prompt, str) else tuple(prompt))
    return tuple(read)


def _common(fields: Mapping[str, Any], *, strict: bool) -> dict[str, Any]:
    """Read the fields that both kinds of requests share."""
    named = "max_completion_tokens" if fields.get("max_completion_tokens") is not None else "max_tokens"
    most = read_number(fields, named, int, None)
    if most is not None and most < 1:
        raise APIError(f"{named}: at least 1, got {most}", param=named)
    n = read_number(fields, "n", int, 1)
    if not 1 <= n <= MAX_CHOICES:
        raise APIError(f"n: expected 1 to {MAX_CHOICES}, got {n}", param="n")
    if strict:
        for name, neutral in _NOT_SERVED.items():
            if fields.get(name) not in (None, False, *neutral):
                raise APIError(f"{name}: not supported by this server; leave it out", param=name)
    seed = read_number(fields, "seed", int, None)
    if seed is not None and not 0 <= seed <= MAX_SEED:
        raise APIError(f"seed: expected 0 to {MAX_SEED}, got {seed}", param="seed")
    model, options = fields.get("model"), fields.get("stream_options")
    return {
        "n": n,
        "max_tokens": most,
        "stop": _stops(fields),
        "sampling": _sampling(fields),
        "seed": seed,
        "stream": read_flag(fields, "stream"),
        "stream_usage": isinstance(options, Mapping) and options.get("include_usage") is True,
        "model": model if isinstance(model, str) else "",
        "return_token_ids": read_flag(fields, "return_token_ids"),
    }


def _stops(fields: Mapping[str, Any]) -> tuple[str, ...]:
    given = fields.get("stop") or ()
    stops: tuple[Any, ...]
    stops = (given,) if isinstance(given, str) else tuple(given) if isinstance(given, list | tuple) else (None,)
    if not all(isinstance(each, str) and each for each in stops):
        raise APIError("stop: expected a text or a list of texts; none may be empty", param="stop")
    if len(stops) > MAX_STOPS or any(len(each) > MAX_STOP_CHARACTERS for each in stops):
        raise APIError(
            f"stop: at most {MAX_STOPS} texts of at most {MAX_STOP_CHARACTERS} characters, got {len(stops)}",
            param="stop",
        )
    return stops


def _sampling(fields: Mapping[str, Any]) -> dict[str, Any]:
    found = {name: read_number(fields, name, kind, None) for name, kind in _SAMPLING.items()}
    found = {name: value for name, value in found.items() if value is not None}
    for name, (least, greatest) in _RANGES.items():
        if name in found and not least <= found[name] <= greatest:
            raise APIError(f"{name}: expected {least:g} to {greatest:g}, got {found[name]}", param=name)
    ids = fields.get("stop_token_ids") or ()
    if not isinstance(ids, list | tuple) or not all(type(i) is int and 0 <= i <= MAX_SEED for i in ids):
        raise APIError("stop_token_ids: expected a list of non-negative integers", param="stop_token_ids")
    if len(ids) > MAX_STOPS:
        raise APIError(f"stop_token_ids: at most {MAX_STOPS}, got {len(ids)}", param="stop_token_ids")
    if ids:
        found["stop_token_ids"] = tuple(ids)
    if "ignore_eos" in fields:
        found["ignore_eos"] = read_flag(fields, "ignore_eos")
    return found


_SAMPLING: dict[str, type] = {"temperature": float, "top_p": float, "top_k": int}
_RANGES = {"temperature": (0.0, 100.0), "top_p": (1e-6, 1.0), "top_k": (-1, 2**31)}
_NOT_SERVED: Mapping[str, tuple[Any, ...]] = {
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "repetition_penalty": (1,),
    "min_p": (0,),
    "logit_bias": ({},),
    "best_of": (1,),
    "echo": (),
    "suffix": ("",),
    "response_format": ({"type": "text"},),
    "functions": ([],),
    "tool_choice": ("auto", "none", "required"),
    "chat_template_kwargs": ({},),
    "min_tokens": (0,),
    "bad_words": ([],),
    "allowed_token_ids": ([],),
    "structured_outputs": (),
    "guided_json": (),
    "guided_regex": (),
    "guided_choice": (),
    "guided_grammar": (),
}
"""Unsupported fields that would change answers -> values that change nothing."""
