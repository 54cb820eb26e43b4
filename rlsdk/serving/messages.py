"""OpenAI's messages, read with errors that say what was expected; and replies: bodies, stream chunks, logprobs."""

from __future__ import annotations

import json
import math
import time
from collections.abc import AsyncGenerator, Mapping, Sequence
from typing import Any, cast

import attrs
import numpy as np

from rlsdk.contracts import TopTokens
from rlsdk.contracts.generation import MAX_TOP_LOGPROBS
from rlsdk.errors import ValueFault
from rlsdk.messages import Image, Message, Part, Role
from rlsdk.rollout.codec import ChatTokenizer

_ROLES: dict[str, Role] = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "assistant": "assistant",
    "tool": "tool",
}
LEAST_LOGPROB = -9999.0
"""OpenAI's logprob of an impossible token, since JSON has no infinity."""


class APIError(Exception):
    """An error in OpenAI's format: what was requested, what is supported, what to do.

    Attributes:
        status: HTTP status.
        code: Name for programs, such as `context_length_exceeded`.
        param: The field at fault.
    """

    def __init__(self, message: str, *, status: int = 400, code: str | None = None, param: str | None = None) -> None:
        super().__init__(message)
        self.status, self.code, self.param = status, code, param

    @property
    def body(self) -> dict[str, Any]:
        """Return the error in the format of OpenAI's servers."""
        kind = {401: "authentication_error"}.get(
            self.status, "invalid_request_error" if self.status < 500 else "server_error"
        )
        return {"error": {"message": str(self), "type": kind, "param": self.param, "code": self.code}}


@attrs.frozen
class ChatToolCall:
    """A tool call; `arguments` are JSON, as written."""

    id: str
    name: str
    arguments: str

    @property
    def key(self) -> tuple[str, str]:
        """Key that is equal for equivalent calls, since clients rewrite JSON and choose their own ids."""
        try:
            return self.name, json.dumps(json.loads(self.arguments or "{}"), sort_keys=True)
        except (ValueError, RecursionError):
            return self.name, self.arguments

    def as_openai(self) -> dict[str, Any]:
        """Return the call in OpenAI's format."""
        return {"id": self.id, "type": "function", "function": {"name": self.name, "arguments": self.arguments}}


@attrs.frozen
class ChatMessage:
    """One message of a request, or an answer.

    Attributes:
        role: Role of its author.
        content: Text of the message, with `<image>` in place of each image.
        calls: Tool calls in the message.
        call_id: Id of the call that a tool answers.
        name: Name of the tool, if given by the client.
        reasoning: Thought of the assistant before its answer.
        parts: Texts and images, in order, of a message with images.
    """

    role: Role
    content: str
    calls: tuple[ChatToolCall, ...] = ()
    call_id: str = ""
    name: str = ""
    reasoning: str = ""
    parts: tuple[Part, ...] = ()

    @property
    def images(self) -> tuple[Image, ...]:
        """Images of the message, in order."""
        return tuple(part for part in self.parts if isinstance(part, Image))

    @property
    def key(self) -> tuple[Any, ...]:
        """Key that is equal for equal messages; for answers, white space and thoughts are ignored."""
        if self.role == "assistant":
            text = self.content.rpartition("</think>")[2]
            return self.role, "".join(text.split()), tuple(call.key for call in self.calls)
        return self.role, self.content, self.call_id, *(image.digest for image in self.images)


def read_object(body: Any) -> Mapping[str, Any]:
    """Return a body that must be an object."""
    if not isinstance(body, dict):
        raise APIError(f"expected a JSON object, got {_kind(body)}")
    return body


def read_list(fields: Mapping[str, Any], name: str, *, optional: bool = False) -> list[Any]:
    """Read a field that must be a list; an `optional` one may be missing."""
    value = fields.get(name)
    if value is None and optional:
        return []
    if not isinstance(value, list):
        raise APIError(f"{name}: expected a list, got {_kind(value)}", param=name)
    return value


def read_flag(fields: Mapping[str, Any], name: str) -> bool:
    """Read a field that must be true or false; false if missing."""
    value = fields.get(name)
    if value is not None and not isinstance(value, bool):
        raise APIError(f"{name}: expected true or false, got {_kind(value)}", param=name)
    return value is True


def read_top_logprobs(name: str, count: int) -> int:
    """Reject a number of alternatives per token that no engine gives."""
    if not 0 <= count <= MAX_TOP_LOGPROBS:
        raise APIError(f"{name}: expected 0 to {MAX_TOP_LOGPROBS}, got {count}", param=name)
    return count


def read_number(fields: Mapping[str, Any], name: str, kind: type, default: Any) -> Any:
    """Read a number; the default if missing."""
    value = fields.get(name)
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, (int, float) if kind is float else int):
        expected = "a whole number" if kind is int else "a number"
        raise APIError(f"{name}: expected {expected}, got {_kind(value)}", param=name)
    return value


def read_message(value: Any, where: str) -> ChatMessage:
    """Read one message of a conversation."""
    if not isinstance(value, dict):
        raise APIError(f"{where}: expected an object with role and content, got {_kind(value)}", param=where)
    role = value.get("role")
    if not isinstance(role, str) or role not in _ROLES:
        raise APIError(f"{where}.role: expected {', '.join(_ROLES)}, got {role!r}", param=f"{where}.role")
    parts = _parts(value.get("content"), f"{where}.content", sees=role == "user")
    message = Message(_ROLES[role], parts)
    calls: tuple[ChatToolCall, ...] = ()
    if role == "assistant":
        given = read_list(value, "tool_calls", optional=True)
        calls = tuple(_call(each, f"{where}.tool_calls[{i}]") for i, each in enumerate(given))
    call_id, name = value.get("tool_call_id"), value.get("name")
    thought = value.get("reasoning_content") or value.get("reasoning")
    return ChatMessage(
        message.role,
        message.text,
        calls,
        call_id if role == "tool" and isinstance(call_id, str) else "",
        name if isinstance(name, str) else "",
        thought if role == "assistant" and isinstance(thought, str) else "",
        parts if message.images else (),
    )


def _parts(value: Any, where: str, *, sees: bool) -> tuple[Part, ...]:
    """Return the texts of a message and, if allowed, its images."""
    if value is None or isinstance(value, str):
        return (value or "",)
    if not isinstance(value, list):
        raise APIError(f"{where}: expected a text or a list of parts, got {_kind(value)}", param=where)
    parts: list[Part] = []
    for i, part in enumerate(value):
        kind = part.get("type") if isinstance(part, dict) else _kind(part)
        text = part.get("text", part.get("refusal")) if isinstance(part, dict) else None
        if kind == "image_url" and sees:
            parts.append(_image(part.get("image_url"), f"{where}[{i}]"))
        elif kind in ("text", "refusal") and isinstance(text, str):
            parts.append(text)
        else:
            served = "text and image_url" if sees else "text"
            fault = f"{where}[{i}]: only parts of type {served} are supported here, got {kind!r}"
            raise APIError(fault, param=f"{where}[{i}]")
    return tuple(parts)


def _image(value: Any, where: str) -> Image:
    """Read an image, and open it once: an invalid image is the client's error, not the policy's."""
    url = value.get("url") if isinstance(value, dict) else None
    if not isinstance(url, str):
        raise APIError(f'{where}: expected {{"image_url": {{"url": "data:image/png;base64,…"}}}}', param=where)
    try:
        image = Image(url)
        image.open()
    except (ValueFault, OSError, ValueError, SyntaxError) as error:
        raise APIError(f"{where}: {error}", param=where) from error
    return image


def _call(value: Any, where: str) -> ChatToolCall:
    function = value.get("function") if isinstance(value, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise APIError(f'{where}: expected {{"id": …, "function": {{"name": …, "arguments": …}}}}', param=where)
    arguments = function.get("arguments")
    text = arguments if isinstance(arguments, str) else json.dumps(arguments if arguments is not None else {})
    return ChatToolCall(str(value.get("id") or ""), function["name"], text)


def read_tool(value: Any, where: str) -> Mapping[str, Any]:
    """Read the schema of one tool."""
    function = value.get("function") if isinstance(value, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise APIError(f'{where}: expected {{"type": "function", "function": {{"name": …}}}}', param=where)
    return cast("Mapping[str, Any]", value)


def _kind(value: Any) -> str:
    names = {dict: "an object", list: "a list", str: "a text", bool: "true or false", type(None): "nothing"}
    return names.get(type(value), "a number")


@attrs.frozen(kw_only=True)
class HttpReply:
    """Reply to a request.

    Attributes:
        body: JSON body; empty for a stream.
        events: A stream's chunks. The first is awaited before anything is sent, so that errors get their own status.
        text: Plain text instead of JSON.
        headers: Additional headers.
    """

    body: Mapping[str, Any] = attrs.field(factory=dict)
    events: AsyncGenerator[Mapping[str, Any], None] | None = None
    text: str = ""
    headers: Mapping[str, str] = attrs.field(factory=dict)


@attrs.frozen(kw_only=True)
class AnswerHead:
    """Fields shared by all parts of one answer.

    Attributes:
        id: Id of the answer.
        model: Name of the model.
        fingerprint: Name of the weights, such as `step-40`.
        created: Seconds since 1970.
    """

    id: str
    model: str
    fingerprint: str | None = None
    created: int = attrs.field(factory=lambda: int(time.time()))

    def write(self, kind: str, choices: Sequence[Any], usage: Mapping[str, int] | None = None) -> dict[str, Any]:
        """Write a body or a chunk of a kind: `chat.completion`, `chat.completion.chunk` or `text_completion`."""
        head = {"id": self.id, "object": kind, "created": self.created, "model": self.model}
        known = {} if self.fingerprint is None else {"system_fingerprint": self.fingerprint}
        return {**head, **known, "choices": list(choices), **({} if usage is None else {"usage": dict(usage)})}


@attrs.frozen(eq=False)
class TokenLogprobs:
    """Sampled tokens with their logprobs, and the likeliest alternatives."""

    token_ids: np.ndarray
    logprobs: np.ndarray
    top: TopTokens | None = None


def chat_logprobs(codec: ChatTokenizer, tokens: TokenLogprobs) -> dict[str, Any]:
    """Write logprobs in the format of chat completions."""
    content = []
    for i, (token, logprob) in enumerate(zip(tokens.token_ids, tokens.logprobs, strict=True)):
        top = [] if tokens.top is None else list(zip(tokens.top.ids[i], tokens.top.logprobs[i], strict=True))
        others = [_token(codec, each, value) for each, value in top]
        content.append({**_token(codec, token, logprob), "top_logprobs": others})
    return {"content": content, "refusal": None}


def _token(codec: ChatTokenizer, token: int, logprob: float) -> dict[str, Any]:
    text = codec.token_text(token)
    return {"token": text, "logprob": _finite(logprob), "bytes": list(text.encode())}


def text_logprobs(codec: ChatTokenizer, tokens: TokenLogprobs, offset: int = 0) -> dict[str, Any]:
    """Write logprobs in the format of completions; `offset` characters of the answer precede the tokens."""
    texts = [codec.token_text(token) for token in tokens.token_ids.tolist()]
    if texts and not offset:  # as the answer begins
        texts[0] = codec.shown(tokens.token_ids[:1])
    lengths = [0, *(len(text) for text in texts[:-1])] if texts else []
    top = None
    if tokens.top is not None:
        rows = zip(tokens.top.ids, tokens.top.logprobs, strict=True)
        top = [{codec.token_text(token): _finite(value) for token, value in zip(*row, strict=True)} for row in rows]
    return {
        "tokens": texts,
        "token_logprobs": [_finite(value) for value in tokens.logprobs],
        "top_logprobs": top,
        "text_offset": (offset + np.cumsum(lengths, dtype=np.int64)).tolist(),
    }


def _finite(logprob: float) -> float:
    return max(float(logprob), LEAST_LOGPROB) if not math.isnan(logprob) else LEAST_LOGPROB


def tokens_used(prompt: int, sampled: int) -> dict[str, int]:
    """Count tokens as OpenAI does."""
    return {"prompt_tokens": prompt, "completion_tokens": sampled, "total_tokens": prompt + sampled}


def models(names: Sequence[str], **facts: Any) -> HttpReply:
    """Answer `/models`; `facts` are added to each model."""
    listed = [{"id": name, "object": "model", "created": 0, "owned_by": "rlsdk", **facts} for name in names]
    return HttpReply(body={"object": "list", "data": listed})
