"""Tool calls of Gemma 4: nested arguments in a custom syntax."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import attrs

from rlsdk.marks import tool_parser
from rlsdk.tool_calls.calls import Call, Malformed, blocks, read_value

_QUOTE = '<|"|>'
_BARE = re.compile(r"[^,:{}\[\]]*")
_WORDS = {"true": True, "false": False, "null": None, "None": None}
_HEAD = re.compile(r"call:([\w.\-]{1,128})(?=\{)")
_DEPTH = 64


@tool_parser("gemma")
class Gemma:
    """Calls written `<|tool_call>call:NAME{KEY:VALUE,…}<tool_call|>`, with text between `<|"|>`: Gemma 4."""

    begins = ("<|tool_call>",)
    instructions = 'To call one, answer <|tool_call>call:NAME{KEY:VALUE,…}<tool_call|>, text between <|"|>.'

    def parse(self, text: str) -> list[Call | Malformed]:
        """Parse calls between Gemma's own tokens."""
        return blocks(text, "<|tool_call>", "<tool_call|>", _read)

    def write(self, calls: Sequence[tuple[str, Mapping[str, Any]]]) -> str:
        """Write calls one after another."""
        return "".join(f"<|tool_call>call:{name}{_written(dict(arguments))}<tool_call|>" for name, arguments in calls)


def _read(body: str) -> Call | Malformed:
    head = _HEAD.match(body.strip())
    if not head:
        return Malformed("expected call:NAME{KEY:VALUE,…} after <|tool_call>")
    reader = _Reader(body.strip(), head.end())
    try:
        arguments = reader.value()
    except ValueError as error:
        return Malformed(f"{head[1]}: {error}")
    if reader.text[reader.at :].strip():
        return Malformed(f"{head[1]}: more follows the arguments: {reader.text[reader.at :][:40]!r}")
    return Call(head[1], arguments)


@attrs.define
class _Reader:
    """Reads values one after another."""

    text: str
    at: int
    depth: int = 0

    def value(self) -> Any:
        """Read a value at `at` and advance past it; `ValueError` if there is none."""
        if self.text.startswith(_QUOTE, self.at):
            end = self.text.find(_QUOTE, begin := self.at + len(_QUOTE))
            if end < 0:
                raise ValueError(f"a text is not closed by {_QUOTE}")
            self.at = end + len(_QUOTE)
            return self.text[begin:end]
        opening = self.text[self.at : self.at + 1]
        if opening in ("{", "["):
            return dict(self._items(True)) if opening == "{" else self._items(False)
        found = _BARE.match(self.text, self.at)
        assert found is not None  # it also matches empty text
        self.at = found.end()
        if not (word := found[0].strip()):
            raise ValueError(f"expected a value before {self.text[self.at : self.at + 20]!r}")
        return _WORDS[word] if word in _WORDS else read_value(word)

    def _items(self, named: bool) -> list[Any]:
        """Read the values between two brackets, with keys if they are named."""
        closing = "}" if named else "]"
        found: list[Any] = []
        self.at, self.depth = self.at + 1, self.depth + 1
        if self.depth > _DEPTH:
            raise ValueError(f"arguments are nested more than {_DEPTH} deep")
        while not self._passed(closing):
            if found and not self._passed(","):
                raise ValueError(f"expected , or {closing} before {self.text[self.at : self.at + 20]!r}")
            key = str(self._key()) if named else ""
            found.append((key, self.value()) if named else self.value())
        self.depth -= 1
        return found

    def _key(self) -> Any:
        quoted = self.text.startswith(_QUOTE, self.at)
        found = _BARE.match(self.text, self.at)
        key = self.value() if quoted else found[0].strip() if found else ""
        self.at = self.at if quoted or not found else found.end()
        if not self._passed(":"):
            raise ValueError(f"expected KEY:VALUE before {self.text[self.at : self.at + 20]!r}")
        return key

    def _passed(self, mark: str) -> bool:
        """Advance past a marker if it follows."""
        if not self.text.startswith(mark, self.at):
            return False
        self.at += len(mark)
        return True


def _written(value: Any, outermost: bool = True) -> str:
    if isinstance(value, Mapping):
        mark = "" if outermost else _QUOTE
        return "{" + ",".join(f"{mark}{k}{mark}:{_written(v, False)}" for k, v in value.items()) + "}"
    if isinstance(value, (list, tuple)):
        return "[" + ",".join(_written(each, False) for each in value) + "]"
    if isinstance(value, str):
        return f"{_QUOTE}{value}{_QUOTE}"
    return str(value).lower() if isinstance(value, bool) else "null" if value is None else str(value)
