"""Interface of renderers: conversations as a model's tokens, and its answers as messages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import attrs

from rlsdk.tool_calls.calls import Call, Malformed, ToolParser

if TYPE_CHECKING:
    import numpy as np

    from rlsdk.types import Image, Message

__all__ = ["Call", "Malformed", "ParsedAnswer", "Renderer", "TextCodec", "ToolParser"]


@attrs.frozen
class ParsedAnswer:
    """Content, thought and tool calls of an answer.

    Attributes:
        content: Text for the reader.
        reasoning: Thought before it; empty if there is none.
        calls: Calls of tools in their order, those that cannot be read as `Malformed`.
    """

    content: str
    reasoning: str = ""
    calls: tuple[Call | Malformed, ...] = ()


class TextCodec(Protocol):
    """A model's tokenizer, as renderers use it."""

    @property
    def tokenizer(self) -> Any:
        """Tokenizer of transformers."""
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
        """Names of tokens that were added to the vocabulary: role headers, `<tool_call>`, the end of text, …."""
        ...

    def encode(self, text: str) -> np.ndarray:
        """Tokenize text within a conversation, int64 `[k]`; no special tokens are added.

        Names of control tokens in the content of messages stay ordinary characters, as long as the renderer passes the
        content on as it is.
        """
        ...

    def with_images(self, text: str, images: Sequence[Image]) -> str:
        """Replace the mark of each image in a rendered text by the tokens that stand for the image in the model.

        Raises:
            ConfigError: The model sees no images, or the text has not one mark for each.
        """
        ...

    def decode(self, ids: Sequence[np.ndarray]) -> list[str]:
        """Decode several sequences, special tokens left out."""
        ...

    def shown(self, ids: np.ndarray) -> str:
        """Decode tokens, special tokens written out."""
        ...


class Renderer(Protocol):
    """Turns conversations into tokens, and sampled tokens into what they say.

    Tokens that were sampled are never made again from text: a conversation grows by `bridge_tokens`. Only where the
    renderer shows earlier answers otherwise than they were sampled (most templates drop their thoughts) does it begin
    again from `prompt_tokens`, as another rollout of the same trajectory.
    """

    def open(self, codec: TextCodec, *, keep_history: bool = False) -> None:
        """Take the tokenizer; called once, before anything else.

        Args:
            codec: Tokenizer of the model.
            keep_history: `model.keep_history`: continue with tokens as sampled, whatever is shown otherwise.
        """
        ...

    @property
    def usable(self) -> bool:
        """True if conversations can be rendered; False leaves prompts that are text, as for a base model."""
        ...

    @property
    def stop_tokens(self) -> tuple[int, ...]:
        """Ids of the tokens that end an answer, the end of text among them."""
        ...

    def shows_tools(self, tools: Sequence[Mapping[str, Any]]) -> bool:
        """Return True if prompts list these tools (JSON schemas) for the policy."""
        ...

    def write_calls(self, calls: Sequence[tuple[str, Mapping[str, Any]]]) -> str:
        """Write an answer that makes these calls, (name, arguments), as in a prompt; empty: it shows no calls.

        The tool parser of a run that names none is the first that reads these.
        """
        ...

    def generation_prompt(self) -> np.ndarray:
        """Return the tokens that open an answer, at the end of each prompt, int64 `[k]`."""
        ...

    def prompt_tokens(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] = ()) -> np.ndarray:
        """Return the tokens of a conversation with the next answer opened, int64 `[p]`.

        A last message of the assistant is left open instead: the policy continues it.

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
            ended: Tokens of the last answer if it ended by itself: its sampled end is not added again. Empty if it was
                cut off.
            tools: As in `prompt_tokens`.

        Returns:
            None where earlier answers are now shown otherwise than they were sampled.

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
        """Read an answer.

        Args:
            token_ids: Sampled tokens, int64 `[k]`, its end token included.
            prefill: Text that the answer begins with; content and reasoning include it.
            continued: The prefill is a message of the prompt, so that no generation prompt stands before it.
            parser: Reads tool calls; None: none are looked for.
            done: False while the answer is still sampled: what may be the beginning of a mark is held back.
        """
        ...
