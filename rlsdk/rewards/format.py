"""Whether a response has the form that was asked for, whatever it says."""

from __future__ import annotations

import re
from typing import Any

import attrs

import rlsdk
from rlsdk.errors import ValueFault
from rlsdk.rewards.matching import compiled
from rlsdk.types import Rollout, Score

_SPACE = re.compile(r"\s*")
_NAME = re.compile(r"\w[\w.-]*")


@rlsdk.reward("format")
@attrs.frozen(kw_only=True)
class Format:
    """1 if the response consists of the tags in their order, each once, with nothing but space around them; else 0.

    Where the prompt is text that ends with the first opening tag (`…<think>`), the response continues behind that tag.

    Attributes:
        pattern: A regular expression (of the package `regex`) that must match the whole response; it takes the place of
            the tags. Write `(?s)` at its beginning if `.` shall match line breaks.
        tags: Names of the tags; `think` stands for `<think>…</think>`.
        timeout: Seconds for a match of the pattern; beyond them the score is invalid.
    """

    pattern: str | None = None
    tags: tuple[str, ...] = ("think", "answer")
    timeout: float = 1.0
    _compiled: Any = attrs.field(default=None, init=False, eq=False, repr=False)

    def __attrs_post_init__(self) -> None:
        wrong = [tag for tag in self.tags if not _NAME.fullmatch(tag)]
        if wrong or not self.tags or len(set(self.tags)) < len(self.tags):
            raise ValueFault(f"tags are different names without brackets, such as think; got {list(self.tags)}")
        if self.timeout <= 0:
            raise ValueFault(f"timeout is a number of seconds above 0, got {self.timeout}")
        if self.pattern is not None:
            object.__setattr__(self, "_compiled", compiled(self.pattern))

    def __call__(self, rollout: Rollout) -> Score:
        """Score one rollout.

        Args:
            rollout: What to score.

        Returns:
            1 or 0, and the same as the metric `format`; invalid if the pattern ran out of time.
        """
        if self._compiled is None:
            fault = _tags_fault(_continued(rollout, self.tags[0]), self.tags)
        else:
            try:
                matched = self._compiled.fullmatch(rollout.response, timeout=self.timeout)
            except TimeoutError:
                return Score.invalid(f"the pattern took longer than {self.timeout:g} s")
            fault = "" if matched else "the response does not match the pattern"
        return Score(float(not fault), metrics={"format": float(not fault)}, reason=fault)


def _continued(rollout: Rollout, tag: str) -> str:
    """The response, behind the opening tag with which a text prompt ends."""
    prompt = rollout.task.prompt
    opening = f"<{tag}>"
    begun = isinstance(prompt, str) and prompt.rstrip().endswith(opening)
    return opening + rollout.response if begun else rollout.response


def _tags_fault(text: str, tags: tuple[str, ...]) -> str:
    """What is wrong with the tags of a text; empty if nothing is."""
    for tag in tags:
        for mark in (f"<{tag}>", f"</{tag}>"):
            if text.count(mark) != 1:
                return f"{mark} occurs {text.count(mark)} times; expected once"
    position = 0
    for tag in tags:
        position = _SPACE.match(text, position).end()  # type: ignore[union-attr]  # it matches the empty text
        if not text.startswith(f"<{tag}>", position):
            return f"<{tag}> is not where it should begin"
        position = text.find(f"</{tag}>", position) + len(tag) + 3
        if position < len(tag) + 3:
            return f"</{tag}> comes before <{tag}>"
    return "" if not text[position:].strip() else f"there is text behind </{tags[-1]}>"
