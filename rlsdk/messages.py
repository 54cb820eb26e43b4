"""Messages of a conversation, and the base class of frozen values."""

from __future__ import annotations

import base64
import hashlib
import io
import json
import operator
import reprlib
from collections.abc import Iterable, Mapping, Sequence
from functools import cache, cached_property
from types import MappingProxyType
from typing import Any, Literal

import attrs

from rlsdk.errors import ValueFault

Role = Literal["system", "user", "assistant", "tool"]
IMAGE = "<image>"
"""Placeholder for an image in a message's text."""
QUICK_CHARACTERS = 20_000
"""Messages with more characters are tokenized in a thread, since other conversations share the event loop."""
_SIGNATURES = {b"\x89PNG\r\n\x1a\n": "png", b"\xff\xd8\xff": "jpeg", b"RIFF": "webp", b"GIF8": "gif"}
"""First bytes of a file -> its media type."""
_PLAIN_NUMBERS = (float, int, bool)


def frozen_mapping(value: Mapping[str, Any] | None) -> Mapping[str, Any]:
    """Return a read-only copy of a mapping; None becomes an empty one."""
    return value if isinstance(value, MappingProxyType) else MappingProxyType(dict(value or {}))


def frozen_numbers(value: Mapping[str, Any] | None) -> Mapping[str, float]:
    """Return a read-only copy of a mapping with its values as Python numbers; None becomes an empty one.

    Raises:
        ValueFault: A name is not text, or a value is not a number.
    """
    if isinstance(value, MappingProxyType):
        return value
    numbers = {}
    for name, each in (value or {}).items():
        if not isinstance(name, str):
            raise ValueFault(f"the name of a metric is {reprlib.repr(name)}; expected text")
        numbers[name] = each if type(each) in _PLAIN_NUMBERS else number(each, f"the metric {name!r}")
    return MappingProxyType(numbers)


def number(value: Any, what: str) -> float:
    """Return a number as a Python number.

    Args:
        value: A Python or NumPy number, or a tensor with one element.
        what: Name of the value in the error message.

    Raises:
        ValueFault: The value is something else, such as text.
    """
    if type(value) in _PLAIN_NUMBERS:
        plain: float = value
        return plain
    try:
        if isinstance(value, str | bytes):
            raise TypeError
        return float(value)  # a NumPy scalar or a tensor with one element, which JSON cannot hold
    except (TypeError, ValueError, RuntimeError, OverflowError):
        raise ValueFault(f"{what} is {reprlib.repr(value)}; expected a number") from None


class Frozen:
    """Pickling for classes with read-only mappings (not picklable) and arrays (whose read-only flag pickling drops)."""

    def __getstate__(self) -> dict[str, Any]:
        values = self.__dict__.items()
        return {name: dict(value) if type(value) is MappingProxyType else value for name, value in values}

    def __setstate__(self, state: dict[str, Any]) -> None:
        mappings, others = _converted(type(self))  # type: ignore[arg-type]
        for name in mappings:
            state[name] = MappingProxyType(state[name])
        for name in others:
            if hasattr(value := state[name], "setflags"):
                value.setflags(write=False)
        self.__dict__.update(state)


@cache
def _converted(cls: type) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the names of fields with a converter: read-only mappings, and all others."""
    fields = {field.name: field.converter for field in attrs.fields(cls) if field.converter is not None}
    mappings = {name for name, converter in fields.items() if converter in (frozen_mapping, frozen_numbers)}
    return tuple(mappings), tuple(fields.keys() - mappings)


@attrs.frozen(slots=False, getstate_setstate=False)
class ToolCall(Frozen):
    """A tool call in an assistant message.

    Attributes:
        name: Name of the tool.
        arguments: Arguments by name, read-only.
        id: Id by which the result refers to the call; empty if none was given.
    """

    name: str
    arguments: Mapping[str, Any] = attrs.field(factory=dict, converter=frozen_mapping, hash=False)
    id: str = ""


def _encoded(value: Any) -> bytes:
    """Return image file bytes: those given, those in a data URL, or a PNG made from a picture in memory."""
    if isinstance(value, Image):
        return value.data
    if isinstance(value, bytes):
        return value
    if isinstance(value, str):
        return _from_data_url(value)
    if not hasattr(value, "save"):
        value = _picture(value)
    out = io.BytesIO()
    value.convert("RGB").save(out, format="PNG")
    return out.getvalue()


def _from_data_url(value: str) -> bytes:
    head, _, content = value.partition(",")
    if head.startswith("data:image/") and head.endswith(";base64"):
        try:
            return base64.b64decode(content, validate=True)
        except ValueError as error:
            raise ValueFault(f"image: the base64 of {value[:40]!r}… cannot be read: {error}") from None
    raise ValueFault(
        f"image: {value[:80]!r} is not a data URL (data:image/png;base64,…); load files and web addresses when tasks "
        "are created"
    )


def _picture(value: Any) -> Any:
    import numpy as np
    from PIL import Image as Pillow

    if not isinstance(value, np.ndarray) or value.dtype != np.uint8 or value.ndim != 3 or value.shape[2] != 3:
        given = f"{value.dtype} {list(value.shape)}" if isinstance(value, np.ndarray) else type(value).__name__
        raise ValueFault(
            f"image: {given} given; expected the bytes of an image file, a data URL, a PIL image, or uint8 "
            "[height, width, 3]"
        )
    return Pillow.fromarray(value)


def _is_image(_: Any, __: Any, value: bytes) -> None:
    if _file_type(value) is None:
        raise ValueFault(f"image: {len(value)} bytes that begin with {value[:8]!r} are not a PNG, JPEG, WebP or GIF")


def _file_type(data: bytes) -> str | None:
    return next((kind for begin, kind in _SIGNATURES.items() if data.startswith(begin)), None)


@attrs.frozen(repr=False)
class Image:
    """An image in a message: the bytes of its file.

    Created from such bytes, a data URL, a PIL image, or an array, uint8 `[height, width, 3]`; the last two become a
    PNG. Images with equal bytes are equal.

    Attributes:
        data: PNG, JPEG, WebP or GIF.
    """

    data: bytes = attrs.field(converter=_encoded, validator=_is_image)

    def __repr__(self) -> str:
        return f"Image({_file_type(self.data)}, {len(self.data)} bytes, {self.digest[:8]})"

    @cached_property
    def digest(self) -> str:
        """Hash of the bytes, equal in all processes."""
        return hashlib.blake2b(self.data, digest_size=16).hexdigest()

    @property
    def url(self) -> str:
        """The image as a data URL."""
        return f"data:image/{_file_type(self.data)};base64,{base64.b64encode(self.data).decode()}"

    def open(self) -> Any:
        """Return the picture as a PIL image in RGB."""
        from PIL import Image as Pillow

        return Pillow.open(io.BytesIO(self.data)).convert("RGB")


Part = str | Image
"""A part of a message: text or an image."""
Content = str | tuple[Part, ...]
"""Text of a message, or its parts."""


def content_of(value: str | Sequence[Any]) -> Content:
    """Parse a message's content: text, or parts in OpenAI's format.

    Args:
        value: Text, or a sequence of texts, images, `{"type": "text", "text": …}`, `{"type": "image", "image": …}` and
            `{"type": "image_url", "image_url": {"url": …}}`, with anything that `Image` accepts.

    Raises:
        ValueFault: The value or a part is something else.
    """
    if isinstance(value, str):
        return value
    if isinstance(value, bytes | bytearray) or not isinstance(value, Sequence):
        raise ValueFault(f"a message's content is {reprlib.repr(value)}; expected text, or a list of texts and images")
    return tuple(_part(part) for part in value)


def _part(value: Any) -> Part:
    if isinstance(value, str | Image):
        return value
    kind = value.get("type") if isinstance(value, Mapping) else None
    if kind == "text" and isinstance(value.get("text"), str):
        return str(value["text"])
    if kind == "image" and "image" in value:
        return Image(value["image"])
    if kind == "image_url" and isinstance(value.get("image_url"), Mapping) and "url" in value["image_url"]:
        return Image(value["image_url"]["url"])
    given = (
        f"a part of type {kind!r} with {', '.join(map(str, value))}"
        if kind
        else f"a value of type {type(value).__name__}"
    )
    raise ValueFault(
        f"a message's content contains {given}; expected text, an image, or a mapping of type 'text' (with text), "
        "'image' (with image) or 'image_url' (with image_url.url)"
    )


def parts_of(content: Content) -> tuple[Part, ...]:
    """Return the parts of a message; text is one part."""
    return (content,) if isinstance(content, str) else content


def joined(first: Content, separator: str, second: Content) -> Content:
    """Join the contents of two messages, with the separator between them unless one is empty."""
    if not first or not second:
        return first or second
    if isinstance(first, str) and isinstance(second, str):
        return first + separator + second
    return (*parts_of(first), separator, *parts_of(second))


def _tool_calls(value: Iterable[ToolCall | Mapping[str, Any]]) -> tuple[ToolCall, ...]:
    return tuple(call if isinstance(call, ToolCall) else _read_tool_call(call) for call in value or ())


def _read_tool_call(value: Any) -> ToolCall:
    function = value.get("function", value) if isinstance(value, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise ValueFault(
            f"a tool call is {reprlib.repr(value)}; expected a ToolCall, or a mapping with function.name and "
            "function.arguments"
        )
    arguments = function.get("arguments") or {}
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except (ValueError, RecursionError):
            arguments = None
    if not isinstance(arguments, Mapping):
        given = f"{function['arguments']!r:.100}"
        raise ValueFault(f"tool call {function.get('name')!r}: arguments are {given}; expected an object")
    return ToolCall(function["name"], arguments, value.get("id") or "")


@attrs.frozen
class Message:
    """One message of a conversation.

    For an answer of the policy, `content` is the text as sampled, including thoughts and tool calls; `reasoning` and
    `tool_calls` are parsed from it. For other messages, they are separate from the content.

    Attributes:
        role: system, user, assistant or tool.
        content: Text or, for a message with images, a tuple of texts and `Image`s; OpenAI's format is also accepted.
        name: Name of the tool, for a tool result.
        tool_calls: Tool calls made by the assistant.
        tool_call_id: Id of the tool call, for a tool result.
        reasoning: Thought of the assistant before its answer.
        prompt: For assistant messages: True if the message was given (a few-shot answer, an earlier turn of the data),
            False if the policy wrote it. `Rollout` replaces None. Ignored by equality.
    """

    role: Role
    content: Content = attrs.field(converter=content_of)
    name: str = ""
    tool_calls: tuple[ToolCall, ...] = attrs.field(default=(), converter=_tool_calls, kw_only=True)
    tool_call_id: str = attrs.field(default="", kw_only=True)
    reasoning: str = attrs.field(default="", kw_only=True)
    prompt: bool | None = attrs.field(default=None, eq=False, kw_only=True)

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle only the values: messages are the most expensive part of sending a rollout to another process."""
        return restored_message, message_values(self)

    @property
    def text(self) -> str:
        """The content as text, with `<image>` in place of each image."""
        if isinstance(self.content, str):
            return self.content
        return "".join(IMAGE if isinstance(part, Image) else part for part in parts_of(self.content))

    @property
    def images(self) -> tuple[Image, ...]:
        """Images of the content, in order."""
        if isinstance(self.content, str):
            return ()
        return tuple(part for part in parts_of(self.content) if isinstance(part, Image))

    def as_json(self) -> dict[str, Any]:
        """Return the message in OpenAI's format as JSON values, without empty fields."""
        calls = [
            {"id": c.id, "type": "function", "function": {"name": c.name, "arguments": dict(c.arguments)}}
            for c in self.tool_calls
        ]
        content: str | list[dict[str, str]]
        if isinstance(self.content, str):
            content = self.content
        else:
            content = [
                {"type": "image", "image": part.url} if isinstance(part, Image) else {"type": "text", "text": part}
                for part in self.content
            ]
        more = {"name": self.name, "tool_calls": calls, "tool_call_id": self.tool_call_id, "reasoning": self.reasoning}
        return {"role": self.role, "content": content, **{key: value for key, value in more.items() if value}}

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Message:
        """Parse a message in OpenAI's format; arguments of calls may be an object or its JSON.

        Raises:
            ValueFault: The value has no role, a call has no name, its arguments are neither, or a content part is
                unknown.
        """
        if not isinstance(value, Mapping) or not isinstance(value.get("role"), str):
            raise ValueFault(f"a message is {reprlib.repr(value)}; expected a mapping with role and content")
        return cls(
            value["role"],
            value.get("content") or "",
            value.get("name") or "",
            tool_calls=value.get("tool_calls") or (),
            tool_call_id=value.get("tool_call_id") or "",
            reasoning=value.get("reasoning") or value.get("reasoning_content") or "",
        )


_NAMES = tuple(field.name for field in attrs.fields(Message))
_VALUES = operator.attrgetter(*_NAMES)
_NEW = object.__new__
_ROLE, _CONTENT, _NAME, _CALLS, _CALL_ID, _REASONING, _PROMPT = (getattr(Message, name).__set__ for name in _NAMES)


def message_values(message: Message) -> tuple[Any, ...]:
    """Return the values from which `restored_message` builds an equal message."""
    found: tuple[Any, ...] = _VALUES(message)
    return found


def restored_message(
    role: Role,
    content: Content,
    name: str,
    calls: tuple[ToolCall, ...],
    call_id: str,
    reasoning: str,
    prompt: bool | None,
) -> Message:
    """Build a message from values that are already converted; a driver restores thousands per second."""
    message = _NEW(Message)
    _ROLE(message, role)
    _CONTENT(message, content)
    _NAME(message, name)
    _CALLS(message, calls)
    _CALL_ID(message, call_id)
    _REASONING(message, reasoning)
    _PROMPT(message, prompt)
    return message
