"""Round trip of tool calls through a chat template and the parsers."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rlsdk.errors import ConfigError
from rlsdk.rollout.template import ChatTemplate
from rlsdk.testing.findings import NotApplicable
from rlsdk.tool_calls import PARSERS, Call
from rlsdk.types import Message

_NAME = "rlsdk_lookup"
_QUESTION = {"role": "user", "content": "Q"}


def round_trip_fault(template: ChatTemplate, conversation: Sequence[Message]) -> str | None:
    """Write tool calls with a template, read them with the parser that knows its format, and compare.

    Args:
        template: The chat template.
        conversation: Its texts become arguments; with several messages, two calls are made at once.

    Returns:
        What was read instead of the calls; None if they came back.

    Raises:
        NotApplicable: The template does not write calls, or no parser knows its form.
    """
    parser = _parser_of(template)
    if parser is None:
        raise NotApplicable("the template writes no tool calls, or no built-in parser knows their form")
    texts = [" ".join(("text", message.content)) for message in conversation]
    calls = [{"first": texts[0], "count": 3}]
    if len(texts) > 1:
        # A template for one call at a time enforces that by an error (Llama 3.1) or assumes it (gpt-oss).
        with contextlib.suppress(ConfigError):
            if _rendered(template, [{"a": 1}, {"b": 2}]).count(_NAME) > 1:
                calls.append({"second": texts[-1]})
    expected = [Call(_NAME, arguments) for arguments in calls]
    got = PARSERS[parser][0](_rendered(template, calls))
    return None if got == expected else f"the parser {parser!r} read {got}, but the template wrote {expected}"


def _parser_of(template: ChatTemplate) -> str | None:
    probe = {"key": "word", "count": 3}
    try:
        text = _rendered(template, [probe])
    except ConfigError:
        return None
    return next((name for name, (parse, _) in PARSERS.items() if parse(text) == [Call(_NAME, probe)]), None)


def _rendered(template: ChatTemplate, calls: Sequence[Mapping[str, Any]]) -> str:
    """Return the text of an answer that calls, without what the template writes before and after it."""
    try:
        text = template.render_closed([_QUESTION, _answer(calls, dict)])
    except ConfigError:  # DeepSeek's templates want arguments as text
        text = template.render_closed([_QUESTION, _answer(calls, json.dumps)])
    opened = template.render([Message("user", "Q")])
    closed = template.render_closed([_QUESTION, {"role": "assistant", "content": "rlsdkanswer"}])
    end = closed.partition("rlsdkanswer")[2]
    if not text.startswith(opened):
        at = text.find("Q") + 1
        return text[at:].removesuffix(end)
    return text[len(opened) :].removesuffix(end)


def _answer(calls: Sequence[Mapping[str, Any]], written: Callable[[Mapping[str, Any]], Any]) -> dict[str, Any]:
    made = [
        {"id": f"call{i:05}", "type": "function", "function": {"name": _NAME, "arguments": written(arguments)}}
        for i, arguments in enumerate(calls)
    ]
    return {"role": "assistant", "content": "", "tool_calls": made}
