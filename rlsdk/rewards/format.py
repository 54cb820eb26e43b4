"""Reward for the format of a response, independent of its content."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Literal

import attrs

import rlsdk
from rlsdk.errors import ValueFault
from rlsdk.rewards.json_form import json_fault, read_schema
from rlsdk.rewards.matching import compiled
from rlsdk.types import Rollout, Score

_SPACE = re.compile(r"\s*")
_NAME = re.compile(r"\w[\w.-]*")


def _where(reward: Format) -> Literal["driver", "pool"]:
    """Choose where the reward runs: counting tags is fast, but a pattern or schema may take its whole `timeout`."""
    return "driver" if reward.pattern is None and reward.json_schema is None else "pool"


@rlsdk.reward("format", runs=_where, cache=True)
@attrs.frozen(kw_only=True)
class Format:
    """1 if the response is the given tags, in order and each once, or matches a pattern or JSON schema; else 0.

    Only white space may be outside the tags. If the prompt is text that ends with the first opening tag (`…<think>`),
    the response continues after that tag.

    Attributes:
        pattern: Regular expression (of the package `regex`) that must match the whole response; it replaces the tags.
            Begin it with `(?s)` if `.` should match line breaks.
        tags: Names of the tags; `think` means `<think>…</think>`.
        json_schema: A JSON schema, or the path of a .json file with one. The whole response must be JSON that satisfies
            it; this replaces the tags unless `within` is given.
        within: Name of the tag that contains the JSON; the tags are then also checked.
        timeout: Seconds for a match of the pattern or a check of the schema; if exceeded, the score is invalid.
    """

    pattern: str | None = None
    tags: tuple[str, ...] = ("think", "answer")
    json_schema: Mapping[str, Any] | str | None = None
    within: str | None = None
    timeout: float = 1.0
    _compiled: Any = attrs.field(default=None, init=False, eq=False, repr=False)
    _schema: str | None = attrs.field(default=None, init=False, eq=False, repr=False)

    def __attrs_post_init__(self) -> None:
        wrong = [tag for tag in self.tags if not _NAME.fullmatch(tag)]
        if wrong or not self.tags or len(set(self.tags)) < len(self.tags):
            raise ValueFault(f"tags must be different names without brackets, such as think; got {list(self.tags)}")
        if self.timeout <= 0:
            raise ValueFault(f"timeout must be a number of seconds above 0; got {self.timeout}")
        if self.pattern is not None:
            object.__setattr__(self, "_compiled", compiled(self.pattern))
        if self.json_schema is not None:
            object.__setattr__(self, "_schema", read_schema(self.json_schema))
        if self.pattern is not None and self.json_schema is not None:
            raise ValueFault("pattern and json_schema both describe the whole response; give only one of them")
        if self.within is not None and (self.json_schema is None or self.within not in self.tags):
            raise ValueFault(
                f"within must name the one of the tags {', '.join(self.tags)} that holds the JSON of json_schema; got "
                f"{self.within!r}" + (" without json_schema" if self.json_schema is None else "")
            )

    def __call__(self, rollout: Rollout) -> Score:
        """Score one rollout.

        Args:
            rollout: Rollout to score.

        Returns:
            Score 1 or 0, also as the metric `format`; invalid if the pattern or the schema ran out of time.
        """
        try:
            fault = self._fault(rollout)
        except TimeoutError:
            what = "pattern" if self._schema is None else "schema"
            return Score.invalid(f"the {what} took longer than {self.timeout:g} s")
        return Score(float(not fault), metrics={"format": float(not fault)}, reason=fault)

    def _fault(self, rollout: Rollout) -> str:
        """Return the format error of the response; empty if there is none."""
        if self._compiled is not None:
            matched = self._compiled.fullmatch(rollout.response, timeout=self.timeout)
            return "" if matched else "the response does not match the pattern"
        if self._schema is not None and self.within is None:
            return json_fault(rollout.response, self._schema, self.timeout)
        text, opening = rollout.response, f"<{self.tags[0]}>"
        prompt = rollout.task.prompt
        if isinstance(prompt, str) and prompt.rstrip().endswith(opening):  # the response continues it
            text = opening + text
        fault = _tags_fault(text, self.tags)
        if fault or self._schema is None:
            return fault
        held = text.partition(f"<{self.within}>")[2].partition(f"</{self.within}>")[0]
        fault = json_fault(held, self._schema, self.timeout)
        return f"<{self.within}>: {fault}" if fault else ""


def _tags_fault(text: str, tags: tuple[str, ...]) -> str:
    """Return the error in the tags of a text; empty if there is none."""
    for tag in tags:
        for mark in (f"<{tag}>", f"</{tag}>"):
            if text.count(mark) != 1:
                return f"{mark} occurs {text.count(mark)} times; expected once"
    position = 0
    for tag in tags:
        position = _SPACE.match(text, position).end()  # type: ignore[union-attr]  # it matches the empty text
        if not text.startswith(f"<{tag}>", position):
            return f"<{tag}> is not where it should be"
        position = text.find(f"</{tag}>", position) + len(tag) + 3
        if position < len(tag) + 3:
            return f"</{tag}> comes before <{tag}>"
    return "" if not text[position:].strip() else f"there is text after </{tags[-1]}>"
