"""OpenAI's chat completions and completions as values: requests read strictly, answers and errors written."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, Literal, cast

import attrs

from rlsdk.types import Message, Role

MAX_CHOICES = 128
_ROLES: dict[str, Role] = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "assistant": "assistant",
    "tool": "tool",
}


class Refusal(Exception):
    """A request that is not served: what was asked, what is served, what to do.

    Attributes:
        status: Of HTTP.
        code: For programs, such as `context_length_exceeded`.
        param: The field at fault.
    """

    def __init__(self, message: str, *, status: int = 400, code: str | None = None, param: str | None = None) -> None:
        super().__init__(message)
        self.status, self.code, self.param = status, code, param

    @property
    def body(self) -> dict[str, Any]:
        """As OpenAI's servers write it."""
        kind = "invalid_request_error" if self.status < 500 else "server_error"
        return {"error": {"message": str(self), "type": kind, "param": self.param, "code": self.code}}


@attrs.frozen
class ToolCall:
    """A call of a tool; `arguments` are JSON, as it was written."""

    id: str
    name: str
    arguments: str

    @property
    def key(self) -> tuple[str, str]:
        """Equal for calls that mean the same: clients write JSON anew, and give ids of their own."""
        try:
            return self.name, json.dumps(json.loads(self.arguments or "{}"), sort_keys=True)
        except (ValueError, RecursionError):
            return self.name, self.arguments

    def told(self) -> dict[str, Any]:
        """As OpenAI writes it."""
        return {"id": self.id, "type": "function", "function": {"name": self.name, "arguments": self.arguments}}


@attrs.frozen
class Said:
    """One message of a request, or an answer.

    Attributes:
        role: Who said it.
        content: Its text.
        calls: Of tools.
        call_id: The call that a tool answers.
        name: Of the tool, where the client says it.
    """

    role: Role
    content: str
    calls: tuple[ToolCall, ...] = ()
    call_id: str = ""
    name: str = ""

    @property
    def key(self) -> tuple[Any, ...]:
        """Equal for messages that are one and the same: of an answer, white space is the client's."""
        if self.role == "assistant":
            return self.role, "".join(self.content.split()), tuple(call.key for call in self.calls)
        return self.role, self.content, self.call_id


@attrs.frozen(kw_only=True)
class ChatAsked:
    """A request for the next message of a conversation."""

    messages: tuple[Said, ...]
    tools: tuple[Mapping[str, Any], ...] = ()
    calling: bool = False
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    sampling: Mapping[str, Any] = attrs.field(factory=dict)
    seed: int | None = None
    stream: bool = False
    stream_usage: bool = False
    model: str = ""

    def named(self, said: Said) -> Message:
        """A message with the name of its tool, which clients tell with the call."""
        calls = {call.id: call.name for each in self.messages for call in each.calls}
        return Message(said.role, said.content, (said.name or calls.get(said.call_id, "")) * (said.role == "tool"))


@attrs.frozen(kw_only=True)
class TextAsked:
    """A request to continue a text, or tokens."""

    prompt: str | tuple[int, ...]
    n: int = 1
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    sampling: Mapping[str, Any] = attrs.field(factory=dict)
    seed: int | None = None
    model: str = ""


@attrs.frozen(kw_only=True)
class Reply:
    """An answer: a whole body, and, where it was asked for as a stream, the events that it is told in."""

    body: Mapping[str, Any]
    events: tuple[Mapping[str, Any], ...] | None = None


def read_chat(body: Any) -> ChatAsked:
    """A request of `/chat/completions`.

    Raises:
        Refusal: It is none, or asks for what is not served.
    """
    fields = _object(body)
    if _number(fields, "n", int, 1) != 1:
        raise Refusal("n: one answer a request is served; ask again for another", param="n")
    messages = tuple(_said(each, f"messages[{i}]") for i, each in enumerate(_list(fields, "messages")))
    if not messages:
        raise Refusal("messages: expected some, got none", param="messages")
    if messages[-1].role == "assistant":
        raise Refusal("messages: the last one is the assistant's; expected one to be answered", param="messages")
    tools = tuple(_tool(each, f"tools[{i}]") for i, each in enumerate(_list(fields, "tools", optional=True)))
    options = fields.get("stream_options") or {}
    return ChatAsked(
        messages=messages,
        tools=tools,
        calling=bool(tools) and fields.get("tool_choice") != "none",
        stream=fields.get("stream") is True,
        stream_usage=isinstance(options, Mapping) and options.get("include_usage") is True,
        **_common(fields),
    )


def read_text(body: Any) -> TextAsked:
    """A request of `/completions`.

    Raises:
        Refusal: It is none, or asks for what is not served.
    """
    fields = _object(body)
    if fields.get("stream"):
        raise Refusal("stream: completions come whole; streams are served by /chat/completions", param="stream")
    n = _number(fields, "n", int, 1)
    if not 1 <= n <= MAX_CHOICES:
        raise Refusal(f"n: expected 1 to {MAX_CHOICES}, got {n}", param="n")
    prompt = fields.get("prompt")
    if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], str | list):
        (prompt,) = prompt
    if isinstance(prompt, list) and prompt and all(type(i) is int and i >= 0 for i in prompt):
        prompt = tuple(prompt)
    if not isinstance(prompt, str | tuple) or not prompt:
        raise Refusal("prompt: expected a text, or a list of token ids, of one prompt", param="prompt")
    return TextAsked(prompt=prompt, n=n, **_common(fields))


def _common(fields: Mapping[str, Any]) -> dict[str, Any]:
    """What both kinds of requests have."""
    named = "max_completion_tokens" if fields.get("max_completion_tokens") is not None else "max_tokens"
    most = _number(fields, named, int, None)
    if most is not None and most < 1:
        raise Refusal(f"{named}: at least 1, got {most}", param=named)
    stop = fields.get("stop") or ()
    stop = (stop,) if isinstance(stop, str) else tuple(stop) if isinstance(stop, list | tuple) else (None,)
    if not all(isinstance(each, str) and each for each in stop):
        raise Refusal("stop: expected a text or a list of texts, none of them empty", param="stop")
    sampling = {name: _number(fields, name, kind, None) for name, kind in _SAMPLING.items()}
    sampling = {name: value for name, value in sampling.items() if value is not None}
    for name, (least, greatest) in _RANGES.items():
        if name in sampling and not least <= sampling[name] <= greatest:
            raise Refusal(f"{name}: expected {least:g} to {greatest:g}, got {sampling[name]}", param=name)
    ids = fields.get("stop_token_ids") or ()
    if not isinstance(ids, list | tuple) or not all(type(i) is int for i in ids):
        raise Refusal("stop_token_ids: expected a list of whole numbers", param="stop_token_ids")
    if ids:
        sampling["stop_token_ids"] = tuple(ids)
    model = fields.get("model")
    seed = _number(fields, "seed", int, None)
    named_model = model if isinstance(model, str) else ""
    return {"max_tokens": most, "stop": stop, "sampling": sampling, "seed": seed, "model": named_model}


_SAMPLING: dict[str, type] = {"temperature": float, "top_p": float, "top_k": int}
_RANGES = {"temperature": (0.0, 100.0), "top_p": (1e-6, 1.0), "top_k": (-1, 2**31)}


def _object(body: Any) -> Mapping[str, Any]:
    if not isinstance(body, dict):
        raise Refusal(f"expected a JSON object, got {_kind(body)}")
    return body


def _list(fields: Mapping[str, Any], name: str, *, optional: bool = False) -> list[Any]:
    value = fields.get(name)
    if value is None and optional:
        return []
    if not isinstance(value, list):
        raise Refusal(f"{name}: expected a list, got {_kind(value)}", param=name)
    return value


def _number(fields: Mapping[str, Any], name: str, kind: type, default: Any) -> Any:
    value = fields.get(name)
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, (int, float) if kind is float else int):
        raise Refusal(f"{name}: expected a {'whole ' * (kind is int)}number, got {_kind(value)}", param=name)
    return value


def _said(value: Any, where: str) -> Said:
    if not isinstance(value, dict):
        raise Refusal(f"{where}: expected an object with role and content, got {_kind(value)}", param=where)
    role = value.get("role")
    if not isinstance(role, str) or role not in _ROLES:
        raise Refusal(f"{where}.role: expected {', '.join(_ROLES)}, got {role!r}", param=f"{where}.role")
    content = _content(value.get("content"), f"{where}.content")
    calls: tuple[ToolCall, ...] = ()
    if role == "assistant":
        given = _list(value, "tool_calls", optional=True)
        calls = tuple(_call(each, f"{where}.tool_calls[{i}]") for i, each in enumerate(given))
    call_id, name = value.get("tool_call_id"), value.get("name")
    return Said(
        _ROLES[role],
        content,
        calls,
        call_id if role == "tool" and isinstance(call_id, str) else "",
        name if isinstance(name, str) else "",
    )


def _content(value: Any, where: str) -> str:
    """The text of a message; parts of it are joined as they are."""
    if value is None or isinstance(value, str):
        return value or ""
    if not isinstance(value, list):
        raise Refusal(f"{where}: expected a text or a list of parts, got {_kind(value)}", param=where)
    texts = []
    for i, part in enumerate(value):
        kind = part.get("type") if isinstance(part, dict) else _kind(part)
        text = part.get("text", part.get("refusal")) if isinstance(part, dict) else None
        if kind not in ("text", "refusal") or not isinstance(text, str):
            raise Refusal(f"{where}[{i}]: only parts of the type text are served, got {kind!r}", param=f"{where}[{i}]")
        texts.append(text)
    return "".join(texts)


def _call(value: Any, where: str) -> ToolCall:
    function = value.get("function") if isinstance(value, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise Refusal(f'{where}: expected {{"id": …, "function": {{"name": …, "arguments": …}}}}', param=where)
    arguments = function.get("arguments")
    text = arguments if isinstance(arguments, str) else json.dumps(arguments if arguments is not None else {})
    return ToolCall(str(value.get("id") or ""), function["name"], text)


def _tool(value: Any, where: str) -> Mapping[str, Any]:
    function = value.get("function") if isinstance(value, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise Refusal(f'{where}: expected {{"type": "function", "function": {{"name": …}}}}', param=where)
    return cast("Mapping[str, Any]", value)


def _kind(value: Any) -> str:
    names = {dict: "an object", list: "a list", str: "a text", bool: "true or false", type(None): "nothing"}
    return names.get(type(value), "a number")


Finish = Literal["stop", "length", "tool_calls"]


def chat_reply(
    asked: ChatAsked, answer: Said, *, id: str, created: int, finish: Finish, usage: Mapping[str, int]
) -> Reply:
    """The answer to a request of `/chat/completions`.

    Args:
        asked: The request.
        answer: The message.
        id: Of the answer.
        created: Seconds since 1970.
        finish: Why it ended.
        usage: As `tokens_used` makes it.
    """
    calls = [call.told() for call in answer.calls]
    head = {"id": id, "created": created, "model": asked.model}
    message = {
        "role": "assistant",
        "content": answer.content if answer.content or not calls else None,
        "refusal": None,
        **({"tool_calls": calls} if calls else {}),
    }
    choice: dict[str, Any] = {"index": 0, "message": message, "logprobs": None, "finish_reason": finish}
    body: dict[str, Any] = {**head, "object": "chat.completion", "choices": [choice], "usage": dict(usage)}
    if not asked.stream:
        return Reply(body=body)
    deltas: list[Mapping[str, Any]] = [{"role": "assistant", "content": message["content"] or ""}]
    deltas += [{"tool_calls": [{"index": i, **call}]} for i, call in enumerate(calls)]
    choices: list[Any] = [[{"index": 0, "delta": delta, "logprobs": None, "finish_reason": None}] for delta in deltas]
    choices.append([{"index": 0, "delta": {}, "logprobs": None, "finish_reason": finish}])
    events = [{**head, "object": "chat.completion.chunk", "choices": each} for each in choices]
    if asked.stream_usage:
        events.append({**head, "object": "chat.completion.chunk", "choices": [], "usage": dict(usage)})
    return Reply(body=body, events=tuple(events))


def tokens_used(prompt: int, sampled: int) -> dict[str, int]:
    """Tokens, as OpenAI counts them."""
    return {"prompt_tokens": prompt, "completion_tokens": sampled, "total_tokens": prompt + sampled}


def models(names: Sequence[str]) -> Reply:
    """The answer of `/models`."""
    listed = [{"id": name, "object": "model", "created": 0, "owned_by": "rlsdk"} for name in names]
    return Reply(body={"object": "list", "data": listed})
