"""A plugin of rlsdk in one file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import attrs
import rlsdk
from rlsdk.kit import TextRenderer


@rlsdk.renderer("my_renderer")
@attrs.define(kw_only=True, slots=False, eq=False)
class MyRenderer(TextRenderer):
    """Conversations as paragraphs, each under a line with the role of its author.

    Attributes:
        mark: Text before the role.
    """

    mark: str = "### "

    def render_text(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool,
        continue_final_message: bool,
    ) -> str:
        """Write a conversation; tools are not listed, so that workflows describe them in a message."""
        text = "".join(f"{self.mark}{message['role']}\n{message['content']}\n\n" for message in messages)
        if continue_final_message:
            return text.removesuffix("\n\n")
        return f"{text}{self.mark}assistant\n" if add_generation_prompt else text
