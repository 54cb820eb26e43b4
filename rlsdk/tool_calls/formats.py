"""How families of models write tool calls. Each parser takes hostile and cut-off text, and never raises.

Special tokens are missing in an answer's text, so each format is read with and without those that mark it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from rlsdk.tool_calls.calls import (
    MAX_CHARACTERS,
    Call,
    Malformed,
    read_arguments,
    read_call,
    read_json,
    read_value,
    too_long,
)

Pairs = Sequence[tuple[str, Mapping[str, Any]]]
_NAME = re.compile(r"[\w.\-]{1,128}")
_HARMONY = re.compile(r"to=functions\.([\w.\-]{1,128})")
_MISTRAL_CALL = re.compile(r"([\w.\-]{1,128})(?:\[CALL_ID\]\w{1,64})?(?:\[ARGS\])?(?=\{)")


def qwen3_coder(text: str) -> list[Call | Malformed]:
    """Calls as `<tool_call><function=NAME><parameter=KEY>VALUE</parameter></function></tool_call>`."""
    return _blocks(text, "<tool_call>", "</tool_call>", _read_qwen3_coder)


def _read_qwen3_coder(body: str) -> Call | Malformed:
    head, opened, rest = body.strip().partition("<function=")
    name, closed, rest = rest.partition(">")
    inside, ended, _ = rest.partition("</function>")
    if head or not opened or not closed or not ended or not _NAME.fullmatch(name):
        return Malformed("expected <function=NAME>…</function> within <tool_call>")
    arguments = {}
    for part in inside.split("<parameter=")[1:]:
        key, closed, rest = part.partition(">")
        value, ended, _ = rest.rpartition("</parameter>")
        if not closed or not ended:
            return Malformed(f"<parameter={key[:40]} is not closed by </parameter>")
        arguments[key] = read_value(value.removeprefix("\n").removesuffix("\n"))
    return Call(name, arguments)


def write_qwen3_coder(calls: Pairs) -> str:
    """Write calls as `qwen3_coder` reads them."""
    return "\n".join(
        f"<tool_call>\n<function={name}>\n"
        + "".join(f"<parameter={key}>\n{_bare(value)}\n</parameter>\n" for key, value in arguments.items())
        + "</function>\n</tool_call>"
        for name, arguments in calls
    )


def glm(text: str) -> list[Call | Malformed]:
    """Calls as `<tool_call>NAME<arg_key>KEY</arg_key><arg_value>VALUE</arg_value></tool_call>`."""
    return _blocks(text, "<tool_call>", "</tool_call>", _read_glm)


def _read_glm(body: str) -> Call | Malformed:
    name, *pairs = body.split("<arg_key>")
    if not _NAME.fullmatch(name.strip()):
        return Malformed("expected the name of a function after <tool_call>")
    arguments = {}
    for pair in pairs:
        key, closed, rest = pair.partition("</arg_key>")
        value, ended, _ = rest.partition("<arg_value>")[2].rpartition("</arg_value>")
        if not closed or not ended:
            return Malformed(f"expected <arg_value>…</arg_value> after <arg_key>{key[:40]}")
        arguments[key.strip()] = read_value(value)
    return Call(name.strip(), arguments)


def write_glm(calls: Pairs) -> str:
    """Write calls as `glm` reads them."""
    return "\n".join(
        f"<tool_call>{name}\n"
        + "".join(f"<arg_key>{k}</arg_key>\n<arg_value>{_bare(v)}</arg_value>\n" for k, v in arguments.items())
        + "</tool_call>"
        for name, arguments in calls
    )


def harmony(text: str) -> list[Call | Malformed]:
    """Calls of gpt-oss: `to=functions.NAME`, then JSON arguments, in the channel `commentary`."""
    found = list(_HARMONY.finditer(text))
    if not found:
        return []
    if len(text) > MAX_CHARACTERS:
        return [too_long(text)]
    ends = [*(match.start() for match in found[1:]), len(text)]
    return [_read_object_after(match[1], text[match.end() : end]) for match, end in zip(found, ends, strict=True)]


def write_harmony(calls: Pairs) -> str:
    """Write calls as `harmony` reads them."""
    return "<|start|>assistant".join(
        f"<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>{_json(arguments)}<|call|>"
        for name, arguments in calls
    )


def deepseek(text: str) -> list[Call | Malformed]:
    """Calls of DeepSeek: `function<｜tool▁sep｜>NAME` and a fence of JSON , or `NAME<｜tool▁sep｜>{…}`."""
    return _blocks(text, "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", _read_deepseek)


def _read_deepseek(body: str) -> Call | Malformed:
    before, _, after = body.partition("<｜tool▁sep｜>")
    name = before if before.strip() != "function" else after.partition("\n")[0]
    if not _NAME.fullmatch(name.strip()):
        return Malformed("expected NAME<｜tool▁sep｜>{…}, or function<｜tool▁sep｜>NAME and a fence of JSON")
    return _read_object_after(name.strip(), after)


def write_deepseek(calls: Pairs) -> str:
    """Write calls as `deepseek` reads them, in the form of V3.1."""
    written = "".join(
        f"<｜tool▁call▁begin｜>{name}<｜tool▁sep｜>{_json(arguments)}<｜tool▁call▁end｜>" for name, arguments in calls
    )
    return f"<｜tool▁calls▁begin｜>{written}<｜tool▁calls▁end｜>"


def mistral(text: str) -> list[Call | Malformed]:
    """Calls as `[TOOL_CALLS][{"name": …, "arguments": {…}}]`, or as `[TOOL_CALLS]NAME[ARGS]{…}`."""
    _, marked, body = text.partition("[TOOL_CALLS]")
    body = body.strip() if marked else text.strip()
    if not marked and not re.match(r"\[\s*\{\s*\"name\"", body):
        return []
    if len(text) > MAX_CHARACTERS:
        return [too_long(text)]
    if body.startswith("["):
        read = read_json(body.removesuffix("</s>"))
        if isinstance(read, Malformed):
            return [read]
        return [read_call(each) for each in (read if isinstance(read, list) else [read])]
    parts = [part for part in body.split("[TOOL_CALLS]") if part.strip()]
    calls = []
    for part in parts:
        head = _MISTRAL_CALL.match(part.strip())
        expected = Malformed("expected NAME[ARGS]{…} after [TOOL_CALLS]")
        calls.append(_read_object_after(head[1], part.strip()[head.end() :]) if head else expected)
    return calls or [Malformed("nothing follows [TOOL_CALLS]")]


def write_mistral(calls: Pairs) -> str:
    """Write calls as `mistral` reads them."""
    objects = [{"name": name, "arguments": dict(arguments)} for name, arguments in calls]
    return f"[TOOL_CALLS]{_json(objects)}"


def llama3(text: str) -> list[Call | Malformed]:
    """Calls as `{"name": …, "parameters": {…}}`, several with `;` between them, after `<|python_tag|>` or nothing."""
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


def write_llama3(calls: Pairs) -> str:
    """Write calls as `llama3` reads them."""
    return "; ".join(_json({"name": name, "parameters": dict(arguments)}) for name, arguments in calls)


def _blocks(text: str, begin: str, end: str, read: Any) -> list[Call | Malformed]:
    """Read each block between two markers, after the thoughts."""
    text = text.rpartition("</think>")[2]
    if begin not in text:
        return []
    if len(text) > MAX_CHARACTERS:
        return [too_long(text)]
    calls = []
    for block in text.split(begin)[1:]:
        body, closed, _ = block.partition(end)
        calls.append(read(body) if closed else Malformed(f"{begin} is not closed by {end}"))
    return calls


def _read_object_after(name: str, text: str) -> Call | Malformed:
    """Read the first JSON object in a text as the arguments of a call."""
    at = text.find("{")
    if at < 0:
        return Malformed(f"{name}: expected a JSON object of arguments")
    try:
        read, _ = json.JSONDecoder().raw_decode(text[at:])
    except (ValueError, RecursionError) as error:
        return Malformed(f"{name}: its arguments are not JSON: {error}")
    return read_arguments(name, read)


def _bare(value: Any) -> str:
    return value if isinstance(value, str) else _json(value)


def _json(value: Any) -> str:
    return json.dumps(dict(value) if isinstance(value, Mapping) else value, ensure_ascii=False)
