"""Chat templates: the text around the messages of a conversation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import attrs

from rlsdk.errors import ConfigError
from rlsdk.types import Message

_QUESTION = Message("user", "Q")
_ANSWER = Message("assistant", "<think>\nT\n</think>\n\nA")


@attrs.frozen
class Between:
    """Text that a template writes between an answer and the next one.

    Attributes:
        closing: Text that closes the answer, such as `<|im_end|>` and a line break.
        text: The whole text: `closing`, the new messages, and the header of the next answer.
    """

    closing: str
    text: str


class ChatTemplate:
    """A tokenizer's chat template. It never renders sampled text in order to have it tokenized again."""

    def __init__(self, tokenizer: Any, *, keep_history: bool = False) -> None:
        """Read the template of a tokenizer.

        Args:
            tokenizer: Tokenizer that has the template.
            keep_history: Continue where the template would rewrite earlier answers.
        """
        self._tokenizer = tokenizer
        self._keep_history = keep_history
        self._checked: set[tuple[str, ...]] = set()

    @property
    def there(self) -> bool:
        """True if the tokenizer has a chat template."""
        return getattr(self._tokenizer, "chat_template", None) is not None

    def render(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] = ()) -> str:
        """Render a conversation with the next answer opened; a last message of the assistant is left open.

        Args:
            messages: The conversation.
            tools: JSON schemas of functions that the policy may call.

        Raises:
            ConfigError: The template refuses the conversation.
        """
        goes_on = messages[-1].role == "assistant"
        return self._render(messages, tools, add_generation_prompt=not goes_on, continue_final_message=goes_on)

    def _render(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] = (), **how: bool) -> str:
        try:
            text: str = self._tokenizer.apply_chat_template(
                [_plain(m) for m in messages], tools=list(tools) or None, tokenize=False, **how
            )
        except Exception as error:
            roles = ", ".join(m.role for m in messages)
            raise ConfigError([f"{self._name} refuses a conversation of {roles}: {error}"]) from error
        return text

    def offers(self, tools: Sequence[Mapping[str, Any]]) -> bool:
        """Return True if the template lists tools for the policy."""
        return self.render([_QUESTION], tools) != self.render([_QUESTION])

    def between(self, messages: Sequence[Message], new: int, tools: Sequence[Mapping[str, Any]] = ()) -> Between:
        """Return the text between the last answer and the next.

        A marker takes the place of the last answer, so that the policy's own text has no influence.

        Args:
            messages: The conversation.
            new: Number of messages, from the end, that follow the last answer.
            tools: As in `render`.

        Raises:
            ConfigError: The template refuses the messages, or rewrites earlier answers because of them.
        """
        before, behind = messages[: len(messages) - new - 1], messages[len(messages) - new :]
        self._check(tuple(dict.fromkeys(m.role for m in behind)))
        mark = "rlsdkmark"
        while any(mark in m.content for m in messages):
            mark += "x"
        answered = [*before, Message("assistant", mark)]
        closed = self._render(answered, tools, add_generation_prompt=False).partition(mark)[2]
        text = self._render([*answered, *behind], tools, add_generation_prompt=True).partition(mark)[2]
        return Between(closed[: _alike(closed, text)], text)

    def _check(self, roles: tuple[str, ...]) -> None:
        """Refuse a template that alters an answer once messages of these roles follow it."""
        if self._keep_history or roles in self._checked:
            return
        wanted = self.render([_QUESTION]) + _ANSWER.content
        behind = [Message(role, "R") for role in roles]  # type: ignore[arg-type]
        found = self._render([_QUESTION, _ANSWER, *behind], add_generation_prompt=True)
        if not found.startswith(wanted):
            at = max(0, _alike(wanted, found) - 10)
            following = ", ".join(roles) or "assistant"
            raise ConfigError(
                [
                    f"{self._name} rewrites an earlier answer once a message ({following}) follows: {wanted[at:]!r} "
                    f"becomes {found[at : at + 50]!r}, which is not what the policy wrote. Let model.tokenizer name a "
                    "folder whose template leaves answers as they are; or set model.keep_history, and later turns "
                    "follow the tokens as they were sampled, thoughts included"
                ]
            )
        self._checked.add(roles)

    @property
    def _name(self) -> str:
        return f"the chat template of {getattr(self._tokenizer, 'name_or_path', '') or 'the tokenizer'!r}"


def _plain(message: Message) -> dict[str, str]:
    named = {"name": message.name} if message.name else {}
    return {"role": message.role, "content": message.content, **named}


def _alike(one: str, other: str) -> int:
    """Return the length of the common prefix."""
    return next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))
