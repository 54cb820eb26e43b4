"""Forms of messages that chat templates expect, messages that probe a template with the results, and thoughts."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

import attrs

from rlsdk.types import Image, Message

QUESTION = Message("user", "Q")
THOUGHT, TEXT = "rlsdkthought", "rlsdkanswer"
THOUGHT_KEYS = ("reasoning_content", "reasoning", "thinking")
"""Names that templates use for the thought of a message."""
ANSWERS: tuple[Mapping[str, str], ...] = (
    {"content": TEXT, **dict.fromkeys(THOUGHT_KEYS, THOUGHT)},
    {"content": f"<think>\n{THOUGHT}\n</think>\n\n{TEXT}"},
)
"""An answer with a thought: in a separate field, under the names that templates use, and within the text."""

RESULT = "rlsdkresult"
_CALL = {"id": "call00001", "type": "function", "function": {"name": "rlsdk_lookup", "arguments": {}}}
_RESULT = {"role": "tool", "content": RESULT, "name": "rlsdk_lookup", "tool_call_id": "call00001"}
RESULTS: Mapping[str, tuple[Any, ...]] = {
    "always": (QUESTION, {"role": "assistant", "content": TEXT}, _RESULT),
    "after calls": (QUESTION, {"role": "assistant", "content": "", "tool_calls": [_CALL]}, _RESULT),
}
"""A tool's result after an answer without a call, and after a call."""


@attrs.frozen
class Between:
    """Text between an answer and the next one.

    Attributes:
        closing: Text that closes the answer, such as `<|im_end|>` and a line break.
        text: The whole text: `closing`, the new messages, and the header of the next answer.
    """

    closing: str
    text: str


@attrs.frozen
class Rewrite:
    """An answer that a template alters once messages follow it, as it was and later, with all text before it."""

    written_whole: str
    found_whole: str

    @property
    def written(self) -> str:
        """Text as originally rendered, around the first difference."""
        return self.written_whole[self._at : self._at + 50]

    @property
    def found(self) -> str:
        """Text as rendered later, around the first difference."""
        return self.found_whole[self._at : self._at + 50]

    @property
    def keeps_text(self) -> bool:
        """True if the answer's text is unchanged: its thought is dropped, or a message is moved before the question."""
        written, found = (each[each.rfind(QUESTION.text) :] for each in (self.written_whole, self.found_whole))
        if written == found:
            return True
        if THOUGHT in found or not found.endswith(TEXT):
            return False
        rest = iter(written)
        return all(character in rest for character in found)

    @property
    def _at(self) -> int:
        return max(0, alike(self.written_whole, self.found_whole) - 10)


def alike(one: Sequence[Any], other: Sequence[Any]) -> int:
    """Return the length of the common prefix of two texts or lists."""
    return next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


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


THINK = ("<think>", "</think>")
CHANNELS = ("<|channel|>analysis<|message|>", "<|end|>")
CLOSED_THOUGHT = re.compile(r"(?:</think[^<>]*>|<\|END_THINKING\|>|\[/THINK\]|<channel\|>)\s*$")
"""The end of a prompt that also closes the thought: in templates of Qwen3, Hy3, Command R7B and Gemma 4."""
_OPENED = re.compile(r"(<[^<>\s]{1,40}>|\[[A-Z_]{1,40}\])\s*$")
_CLOSED = re.compile(r"^\s*(</?[^<>\s]{1,40}>|\[/?[A-Z_]{1,40}\])")
_HARMONY = re.compile(
    r"(?:<\|start\|>assistant)?(?P<to>[^<]*)<\|channel\|>(?P<channel>\w+)(?P<more>[^<]*)(?:<\|constrain\|>[^<]*)?"
    r"<\|message\|>(?P<body>.*?)(?:<\|end\|>|<\|call\|>|<\|return\|>|$)",
    re.DOTALL,
)


def marks_around(written: str, thought: str) -> tuple[str, str]:
    """Return the delimiters of a thought in an answer's text; `<think>` and its end if none are recognised."""
    before, found, after = written.partition(thought)
    if "<|channel|>analysis" in before[-60:]:
        return CHANNELS
    opened, closed = _OPENED.search(before), _CLOSED.search(after)
    return (opened[1], closed[1]) if found and opened and closed else THINK


@attrs.frozen
class SplitAnswer:
    """Thought of an answer, and the text after it, including tool calls."""

    reasoning: str
    rest: str


def split(text: str, marks: tuple[str, str], *, opened: bool) -> SplitAnswer:
    """Split an answer into thought and rest.

    Args:
        text: Answer with special tokens as text.
        marks: Delimiters of thoughts.
        opened: True if the prompt already opened the thought.
    """
    if marks == CHANNELS:
        return _split_channels(text)
    begin, end = marks
    bare = text.lstrip()
    if opened or bare.startswith(begin) or (end in text and begin not in text):
        thought, _, rest = (bare.removeprefix(begin) if bare.startswith(begin) else text).partition(end)
        return SplitAnswer(thought.strip(), rest.lstrip())
    return SplitAnswer("", text)


def _split_channels(text: str) -> SplitAnswer:
    """Split the messages of a gpt-oss answer: `analysis` is thought, calls keep their headers."""
    if "<|channel|>" not in text:
        return SplitAnswer("", text)
    thoughts: list[str] = []
    rest: list[str] = []
    for message in _HARMONY.finditer(text):
        if "to=" in message["to"] + message["more"]:
            rest.append(message[0].removeprefix("<|start|>assistant"))
        else:
            (thoughts if message["channel"] == "analysis" else rest).append(message["body"])
    return SplitAnswer("\n".join(thoughts).strip(), "".join(rest))
