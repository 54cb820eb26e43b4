"""Messages for probing a renderer, and the results of probes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import attrs

from rlsdk.types import Message

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
    """An answer that a template alters once messages follow it, with the conversation before it.

    Attributes:
        written_whole: Text as originally rendered.
        found_whole: Text as rendered later.
    """

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


def alike(one: str, other: str) -> int:
    """Return the length of the common prefix."""
    return next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))
