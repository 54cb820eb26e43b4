"""Interface of renderers: turn conversations into a model's tokens, and its answers into messages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import attrs

from rlsdk.tool_calls import Call, Malformed, ToolParser

if TYPE_CHECKING:
    import numpy as np

    from rlsdk.types import Image, Message

__all__ = ["Call", "Malformed", "ParsedAnswer", "Renderer", "ReplacesTemplate", "TextCodec", "ToolParser"]


@attrs.frozen
class ParsedAnswer:
    """Content, reasoning and tool calls of an answer.

    Attributes:
        content: Visible text.
        reasoning: Thought that precedes the content; empty if there is none.
        calls: Tool calls in order; those that cannot be parsed are `Malformed`.
    """

    content: str
    reasoning: str = ""
    calls: tuple[Call | Malformed, ...] = ()


class TextCodec(Protocol):
    """Interface of a model's tokenizer for renderers."""

    @property
    def tokenizer(self) -> Any:
        """The transformers tokenizer."""
        ...

    @property
    def name(self) -> str:
        """Folder or hub id of the tokenizer, for messages."""
        ...

    @property
    def end(self) -> int | None:
        """Id of the end-of-text token; None if there is none."""
        ...

    @property
    def controls(self) -> frozenset[str]:
        """Names of tokens added to the vocabulary: role headers, `<tool_call>`, the end of text, …."""
        ...

    def encode(self, text: str) -> np.ndarray:
        """Tokenize text within a conversation, int64 `[k]`; no special tokens are added.

        Names of control tokens within the content of messages are encoded as ordinary characters, provided that the
        renderer passes the content on unchanged.
        """
        ...

    def with_images(self, text: str, images: Sequence[Image]) -> str:
        """Replace each image placeholder in a rendered text by the model's image tokens.

        Raises:
            ConfigError: The model does not accept images, or the number of placeholders differs from that of images.
        """
        ...

    def decode(self, ids: Sequence[np.ndarray]) -> list[str]:
        """Decode several sequences without special tokens."""
        ...

    def shown(self, ids: np.ndarray) -> str:
        """Decode tokens, including special tokens."""
        ...


@runtime_checkable
class ReplacesTemplate(Protocol):
    """Optional interface of a renderer that replaces the tokenizer's chat template.

    The template is read once, when the configuration is checked. The tokenizer that the renderer gets in `open` has it,
    in every process of the run, and so has the tokenizer of exported models.
    """

    def read_template(self) -> str | None:
        """Return the template, in Jinja; None to keep the tokenizer's own.

        Raises:
            OptionError: It cannot be read.
        """
        ...


class Renderer(Protocol):
    """Turns conversations into tokens, and sampled tokens into messages.

    Sampled tokens are never re-tokenised from text: a conversation grows by `bridge_tokens`. Only if the renderer shows
    earlier messages differently from before (most templates drop the thoughts of answers, some move system messages)
    does it restart from `prompt_tokens`, as another rollout of the same trajectory.
    """

    def open(self, codec: TextCodec, *, keep_history: bool = False) -> None:
        """Set the tokenizer; called once, before all other methods.

        Args:
            codec: Tokenizer of the model.
            keep_history: `model.keep_history`: continue with the sampled tokens even if the renderer would show them
                differently.
        """
        ...

    @property
    def usable(self) -> bool:
        """True if conversations can be rendered; False if only plain-text prompts can, as for a base model."""
        ...

    @property
    def stop_tokens(self) -> tuple[int, ...]:
        """Ids of the tokens that end an answer, including the end of text."""
        ...

    def shows_tools(self, tools: Sequence[Mapping[str, Any]]) -> bool:
        """Return True if prompts list these tools (JSON schemas) for the policy."""
        ...

    def write_calls(self, calls: Sequence[tuple[str, Mapping[str, Any]]]) -> str:
        """Render an answer that makes these calls, (name, arguments), as in a prompt; empty if calls are not rendered.

        If a run names no tool parser, one that reads this text is used.
        """
        ...

    def generation_prompt(self) -> np.ndarray:
        """Return the tokens that open an answer, at the end of each prompt, int64 `[k]`."""
        ...

    def prompt_tokens(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] = ()) -> np.ndarray:
        """Return the tokens of a conversation with the next answer opened, int64 `[p]`.

        If the last message is the assistant's, it is left open instead: the policy continues it.

        Raises:
            ConfigError: The conversation cannot be rendered.
        """
        ...

    def bridge_tokens(
        self,
        messages: Sequence[Message],
        new: int,
        *,
        ended: np.ndarray,
        tools: Sequence[Mapping[str, Any]] = (),
    ) -> np.ndarray | None:
        """Return the tokens between the last answer and the next, int64 `[k]`: its end, new messages, the next header.

        Args:
            messages: The conversation.
            new: Number of messages, from the end, that follow the last answer.
            ended: Tokens of the last answer if it ended by itself: its sampled end is not repeated. Empty if it was
                truncated.
            tools: As in `prompt_tokens`.

        Returns:
            None if earlier messages are now rendered differently: answers without thoughts, or in another order.

        Raises:
            ConfigError: The conversation cannot be rendered.
        """
        ...

    def parse(
        self,
        token_ids: np.ndarray,
        *,
        prefill: str = "",
        continued: bool = False,
        parser: ToolParser | None = None,
        done: bool = True,
    ) -> ParsedAnswer:
        """Parse an answer.

        Args:
            token_ids: Sampled tokens, int64 `[k]`, including the end token.
            prefill: Text at the beginning of the answer; content and reasoning include it.
            continued: True if the prefill is a message of the prompt, so that no generation prompt precedes it.
            parser: Parser of tool calls; None: do not look for tool calls.
            done: False while the answer is still being sampled: text that may be the start of a marker is held back.
        """
        ...
