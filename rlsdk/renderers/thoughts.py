"""Marks of thoughts in answers: how a model opens and closes them, and how an answer is split at them."""

from __future__ import annotations

import re
from collections.abc import Sequence

import attrs

THINK = ("<think>", "</think>")
CHANNELS = ("<|channel|>analysis<|message|>", "<|end|>")
_OPENED = re.compile(r"(<[^<>\s]{1,40}>|\[[A-Z_]{1,40}\])\s*$")
_CLOSED = re.compile(r"^\s*(</?[^<>\s]{1,40}>|\[/?[A-Z_]{1,40}\])")
_HARMONY = re.compile(
    r"(?:<\|start\|>assistant)?(?P<to>[^<]*)<\|channel\|>(?P<channel>\w+)(?P<more>[^<]*)(?:<\|constrain\|>[^<]*)?"
    r"<\|message\|>(?P<body>.*?)(?:<\|end\|>|<\|call\|>|<\|return\|>|$)",
    re.DOTALL,
)


def marks_around(written: str, thought: str) -> tuple[str, str]:
    """Return the marks around a thought in the text of an answer; `<think>` and its end where none are recognised."""
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
        rest: Text after it, calls of tools included.
    """

    reasoning: str
    rest: str


def split(text: str, marks: tuple[str, str], *, opened: bool) -> SplitAnswer:
    """Split an answer into its thought and the rest.

    Args:
        text: Answer with its special tokens written out.
        marks: Marks of thoughts.
        opened: The prompt has opened the thought already.
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
    """Return a text up to where one of the marks is, or may begin at its end."""
    found = len(text)
    for mark in marks:
        at = text.find(mark)
        if at < 0:
            longest = range(min(len(mark) - 1, len(text)), 0, -1)
            at = len(text) - next((n for n in longest if text.endswith(mark[:n])), 0)
        found = min(found, at)
    return text[:found]
