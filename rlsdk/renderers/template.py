"""The default renderer: a chat template, by default the tokenizer's own."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import attrs

from rlsdk.contracts import TextCodec
from rlsdk.errors import OptionError
from rlsdk.marks import renderer
from rlsdk.renderers.text import TextRenderer

_QUESTION_TEXT = "rlsdkquestion"
_OTHER_TAGS = re.compile(r"\{%-?\s*(?:end)?generation\s*-?%\}")
"""Tags that transformers adds to Jinja; they mark what the policy wrote."""


@renderer("template")
@attrs.define(kw_only=True, slots=False, eq=False)
class TemplateRenderer(TextRenderer):
    """Renders conversations with the tokenizer's chat template, or with one from a file.

    Thoughts are recognised by the delimiters that the template writes around them, including gpt-oss's channels.

    Attributes:
        file: Jinja file with the chat template that replaces the tokenizer's, also in exported models; null keeps the
            tokenizer's.
        variables: Variables of the template, such as `{enable_thinking: false}` for Qwen3.
    """

    file: str | None = None
    variables: Mapping[str, Any] = attrs.field(factory=dict)

    @classmethod
    def of(cls, codec: TextCodec) -> TemplateRenderer:
        """Return the renderer of a tokenizer's own template."""
        made = cls()
        made.open(codec)
        return made

    def read_template(self) -> str | None:
        """Read the file; see `rlsdk.contracts.ReplacesTemplate`."""
        if self.file is None:
            return None
        from jinja2 import TemplateSyntaxError
        from jinja2.sandbox import ImmutableSandboxedEnvironment

        try:
            text = Path(self.file).expanduser().read_text(encoding="utf-8-sig")
            ImmutableSandboxedEnvironment(extensions=["jinja2.ext.loopcontrols"]).parse(_OTHER_TAGS.sub("", text))
        except FileNotFoundError:
            where = f"in the working folder ({Path.cwd().name}/) nor next to the configuration"
            fault = f"there is no file {self.file!r}, neither {where}"
        except (OSError, ValueError) as error:
            fault = f"{self.file!r} cannot be read: {error}"
        except TemplateSyntaxError as error:
            fault = f"{self.file!r} is not a chat template in Jinja: line {error.lineno}: {error.message}"
        else:
            if text.strip():
                return text
            fault = f"{self.file!r} is empty; expected a chat template in Jinja"
        raise OptionError("renderer 'template'", [("file", fault)])

    @property
    def usable(self) -> bool:
        """True if the tokenizer has a chat template."""
        return getattr(self.codec.tokenizer, "chat_template", None) is not None

    @property
    def title(self) -> str:
        """Description of the template, for messages."""
        return f"the chat template of {self.codec.name!r}" if self.file is None else f"the chat template {self.file!r}"

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
