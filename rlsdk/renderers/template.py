"""The default renderer: the tokenizer's chat template."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

import attrs

from rlsdk.contracts import TextCodec
from rlsdk.marks import renderer
from rlsdk.renderers.text import TextRenderer

_QUESTION_TEXT = "rlsdkquestion"


@renderer("template")
@attrs.define(kw_only=True, slots=False, eq=False)
class TemplateRenderer(TextRenderer):
    """Renders conversations with the tokenizer's chat template.

    Thoughts are recognised by the delimiters that the template writes around them, including gpt-oss's channels.

    Attributes:
        variables: Variables of the template, such as `{enable_thinking: false}` for Qwen3.
    """

    variables: Mapping[str, Any] = attrs.field(factory=dict)

    @classmethod
    def of(cls, codec: TextCodec) -> TemplateRenderer:
        """Return the renderer of a tokenizer's own template."""
        made = cls()
        made.open(codec)
        return made

    @property
    def usable(self) -> bool:
        """True if the tokenizer has a chat template."""
        return getattr(self.codec.tokenizer, "chat_template", None) is not None

    @property
    def title(self) -> str:
        """Description of the template, for messages."""
        return f"the chat template of {self.codec.name!r}"

    def render_text(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]], **how: bool
    ) -> str:
        """Apply the template."""
        given = list(messages)
        if self._wants_parts:
            given = [
                {**m, "content": [{"type": "text", "text": m["content"]}]} if isinstance(m["content"], str) else m
                for m in given
            ]
        text: str = self.codec.tokenizer.apply_chat_template(
            given, tools=list(tools) or None, tokenize=False, **self.variables, **how
        )
        return text

    @cached_property
    def _wants_parts(self) -> bool:
        """True for templates of vision models that drop text unless it is in a list of parts."""
        shown = []
        for content in (_QUESTION_TEXT, [{"type": "text", "text": _QUESTION_TEXT}]):
            try:
                text = self.codec.tokenizer.apply_chat_template([{"role": "user", "content": content}], tokenize=False)
            except Exception:  # noqa: BLE001 - a template may raise anything
                return False
            shown.append(_QUESTION_TEXT in text)
        return shown == [False, True]
