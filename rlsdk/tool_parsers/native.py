"""Tool parsers of individual model families. They accept hostile and truncated text, and never raise.

Special tokens may be missing in a prompt's text or another server's, so each syntax is parsed with and without its
markers.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

import attrs

from rlsdk.marks import tool_parser
from rlsdk.tool_calls import (
    MAX_CHARACTERS,
    Call,
    Malformed,
    as_json,
    blocks,
    read_call,
    read_calls,
    read_object_after,
    read_value,
    too_long,
)

Pairs = Sequence[tuple[str, Mapping[str, Any]]]
_NAME = re.compile(r"[\w.\-]{1,128}")
_HARMONY = re.compile(r"to=functions\.([\w.\-]{1,128})")
_MISTRAL_CALL = re.compile(r"([\w.\-]{1,128})(?:\[CALL_ID\]\w{1,64})?(?:\[ARGS\])?(?=\{)")
_QUOTE = '<|"|>'
_BARE = re.compile(r"[^,:{}\[\]]*")
_WORDS = {"true": True, "false": False, "null": None, "None": None}
_HEAD = re.compile(r"call:([\w.\-]{1,128})(?=\{)")
_DEPTH = 64


@tool_parser("qwen3_coder")
class Qwen3Coder:
    """Calls written `<tool_call><function=NAME><parameter=KEY>VALUE</parameter></function></tool_call>`.

    Used by Qwen3-Coder, Qwen3.5 and Nemotron 3. Values are bare text, parsed as JSON or a Python literal if possible.
    """

    begins = ("<tool_call>",)
    instructions = (
        "To call one, answer <tool_call><function=NAME><parameter=KEY>VALUE</parameter></function></tool_call>."
    )

    def parse(self, text: str) -> list[Call | Malformed]:
        """Read calls in tags."""
        return blocks(text, "<tool_call>", "</tool_call>", _read_qwen3_coder)

    def write(self, calls: Pairs) -> str:
        """Write calls in tags."""
        return "\n".join(
            f"<tool_call>\n<function={name}>\n"
            + "".join(f"<parameter={key}>\n{_bare(value)}\n</parameter>\n" for key, value in arguments.items())
            + "</function>\n</tool_call>"
            for name, arguments in calls
        )


def _read_qwen3_coder(body: str) -> Call | Malformed:
    head, opened, rest = body.strip().partition("<function=")
    name, closed, rest = rest.partition(">")
    inside, ended, _ = rest.partition("</function>")
    if head or not opened or not closed or not ended or not _NAME.fullmatch(name):
        return Malformed("expected <function=NAME>…</function> within <tool_call>")
    texts = {}
    for part in inside.split("<parameter=")[1:]:
        key, closed, rest = part.partition(">")
        value, ended, _ = rest.rpartition("</parameter>")
        if not closed or not ended:
            return Malformed(f"<parameter={key[:40]} is not closed by </parameter>")
        texts[key] = value.removeprefix("\n").removesuffix("\n")
    return _bare_call(name, texts)


@tool_parser("glm")
class Glm:
    """Calls written `<tool_call>NAME<arg_key>KEY</arg_key><arg_value>VALUE</arg_value></tool_call>`: GLM 4.5 and later.

    Values are bare text, parsed as JSON or a Python literal if possible.
    """

    begins = ("<tool_call>",)
    instructions = "To call one, answer <tool_call>NAME<arg_key>KEY</arg_key><arg_value>VALUE</arg_value></tool_call>."

    def parse(self, text: str) -> list[Call | Malformed]:
        """Read calls in tags."""
        return blocks(text, "<tool_call>", "</tool_call>", _read_glm)

    def write(self, calls: Pairs) -> str:
        """Write calls in tags."""
        return "\n".join(
            f"<tool_call>{name}\n"
            + "".join(f"<arg_key>{k}</arg_key>\n<arg_value>{_bare(v)}</arg_value>\n" for k, v in arguments.items())
            + "</tool_call>"
            for name, arguments in calls
        )


def _read_glm(body: str) -> Call | Malformed:
    name, *pairs = body.split("<arg_key>")
    if not _NAME.fullmatch(name.strip()):
        return Malformed("expected the name of a function after <tool_call>")
    texts = {}
    for pair in pairs:
        key, closed, rest = pair.partition("</arg_key>")
        value, ended, _ = rest.partition("<arg_value>")[2].rpartition("</arg_value>")
        if not closed or not ended:
            return Malformed(f"expected <arg_value>…</arg_value> after <arg_key>{key[:40]}")
        texts[key.strip()] = value
    return _bare_call(name.strip(), texts)


def _bare_call(name: str, texts: Mapping[str, str]) -> Call:
    return Call(name, {key: read_value(text) for key, text in texts.items()}, texts=texts)


@tool_parser("harmony")
class Harmony:
    """Calls of gpt-oss: `to=functions.NAME`, then JSON arguments, in the channel `commentary`."""

    begins = ("<|channel|>commentary to=functions.", " to=functions.")
    instructions = "To call one, write to=functions.NAME and a JSON object of arguments."

    def parse(self, text: str) -> list[Call | Malformed]:
        """Parse the messages addressed to functions."""
        found = list(_HARMONY.finditer(text))
        if not found:
            return []
        if len(text) > MAX_CHARACTERS:
            return [too_long(text)]
        ends = [*(match.start() for match in found[1:]), len(text)]
        return [read_object_after(match[1], text[match.end() : end]) for match, end in zip(found, ends, strict=True)]

    def write(self, calls: Pairs) -> str:
        """Write each call as a separate message."""
        return "<|start|>assistant".join(
            f"<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>{as_json(arguments)}<|call|>"
            for name, arguments in calls
        )


@tool_parser("deepseek")
class DeepSeek:
    """Calls of DeepSeek: `function<｜tool▁sep｜>NAME` and a JSON fence or, since V3.1, `NAME<｜tool▁sep｜>{…}`."""

    begins = ("<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>")
    instructions = "To call one, answer <｜tool▁call▁begin｜>NAME<｜tool▁sep｜>{…}<｜tool▁call▁end｜>."

    def parse(self, text: str) -> list[Call | Malformed]:
        """Parse calls between DeepSeek's own tokens."""
        return blocks(text, "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", _read_deepseek)

    def write(self, calls: Pairs) -> str:
        """Write calls in the syntax of V3.1."""
        written = "".join(
            f"<｜tool▁call▁begin｜>{name}<｜tool▁sep｜>{as_json(arguments)}<｜tool▁call▁end｜>"
            for name, arguments in calls
        )
        return f"<｜tool▁calls▁begin｜>{written}<｜tool▁calls▁end｜>"


def _read_deepseek(body: str) -> Call | Malformed:
    before, _, after = body.partition("<｜tool▁sep｜>")
    name = before if before.strip() != "function" else after.partition("\n")[0]
    if not _NAME.fullmatch(name.strip()):
        return Malformed("expected NAME<｜tool▁sep｜>{…}, or function<｜tool▁sep｜>NAME and a fence of JSON")
    return read_object_after(name.strip(), after)


@tool_parser("mistral")
class Mistral:
    """Calls written `[TOOL_CALLS][{"name": …, "arguments": {…}}]` or `[TOOL_CALLS]NAME[ARGS]{…}`."""

    begins = ("[TOOL_CALLS]",)
    instructions = 'To call one, answer [TOOL_CALLS][{"name": NAME, "arguments": {…}}].'

    def parse(self, text: str) -> list[Call | Malformed]:
        """Parse the calls after their marker, or a list of objects if the marker is missing."""
        _, marked, body = text.partition("[TOOL_CALLS]")
        body = body.strip() if marked else text.strip()
        if not marked and not re.match(r"\[\s*\{\s*\"name\"", body):
            return []
        if len(text) > MAX_CHARACTERS:
            return [too_long(text)]
        if body.startswith("["):
            return read_calls(body.removesuffix("</s>"))
        parts = [part.strip() for part in body.split("[TOOL_CALLS]") if part.strip()]
        calls = []
        for part in parts:
            head = _MISTRAL_CALL.match(part)
            expected = Malformed("expected NAME[ARGS]{…} after [TOOL_CALLS]")
            calls.append(read_object_after(head[1], part[head.end() :]) if head else expected)
        return calls or [Malformed("nothing follows [TOOL_CALLS]")]

    def write(self, calls: Pairs) -> str:
        """Write calls as one list."""
        return f"[TOOL_CALLS]{as_json([{'name': name, 'arguments': dict(arguments)} for name, arguments in calls])}"


@tool_parser("llama3")
class Llama3:
    """Calls written `{"name": …, "parameters": {…}}`, separated by `;`, optionally after `<|python_tag|>`."""

    begins = ()
    instructions = 'To call one, answer with nothing but {"name": NAME, "parameters": {…}}.'

    def parse(self, text: str) -> list[Call | Malformed]:
        """Parse an answer that consists of objects."""
        text = text.strip().removeprefix("<|python_tag|>").strip()
        if not re.match(r"\{\s*\"(?:name|type)\"", text):
            return []
        if len(text) > MAX_CHARACTERS:
            return [too_long(text)]
        decoder, calls = json.JSONDecoder(), list[Call | Malformed]()
        while text:
            try:
                read, end = decoder.raw_decode(text)
            except (ValueError, RecursionError) as error:
                return [*calls, Malformed(f"it is not JSON: {error}")]
            calls.append(read_call(read))
            text = re.sub(r"^(?:;|,|<\|\w+\|>|\s)+", "", text[end:])
        return calls

    def write(self, calls: Pairs) -> str:
        """Write one object per call."""
        return "; ".join(as_json({"name": name, "parameters": dict(arguments)}) for name, arguments in calls)


def _bare(value: Any) -> str:
    return value if isinstance(value, str) else as_json(value)


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
    reader = _ValueReader(body.strip(), head.end())
    try:
        arguments = reader.value()
    except ValueError as error:
        return Malformed(f"{head[1]}: {error}")
    if reader.text[reader.at :].strip():
        return Malformed(f"{head[1]}: more follows the arguments: {reader.text[reader.at :][:40]!r}")
    return Call(head[1], arguments)


@attrs.define
class _ValueReader:
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
