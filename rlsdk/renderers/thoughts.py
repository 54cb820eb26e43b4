"""Delimiters of thoughts in answers: finding them, and splitting answers at them."""

from __future__ import annotations

import re
from collections.abc import Sequence

import attrs

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
    """The parts of an answer's text.

    Attributes:
        reasoning: Thought; empty if there is none.
        rest: Text after it, including tool calls.
    """

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


def before_mark(text: str, marks: Sequence[str]) -> str:
    """Return text up to the first of the marks, or up to where one may begin at the end of the text."""
    found = len(text)
    for mark in marks:
        at = text.find(mark)
        if at < 0:
            longest = range(min(len(mark) - 1, len(text)), 0, -1)
            at = len(text) - next((n for n in longest if text.endswith(mark[:n])), 0)
        found = min(found, at)
    return text[:found]
