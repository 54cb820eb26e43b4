"""Chat templates: the text that stands around the messages of a conversation."""

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
    """What a template writes between an answer and the next one.

    Attributes:
        closing: What closes the answer, such as `<|im_end|>` and a line break.
        text: All of it: `closing`, the new messages, and what opens the next answer.
    """

    closing: str
    text: str


class Template:
    """A tokenizer's chat template. It is never asked to render what was sampled in order to have it tokenised again."""

    def __init__(self, tokenizer: Any, *, keep_history: bool = False) -> None:
        """Read one.

        Args:
            tokenizer: That has it.
            keep_history: Go on where the template would rewrite earlier answers.
        """
        self._tokenizer = tokenizer
        self._keep_history = keep_history
        self._checked: set[tuple[str, ...]] = set()

    @property
    def there(self) -> bool:
        """Whether the tokenizer has one."""
        return getattr(self._tokenizer, "chat_template", None) is not None

    def render(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] = ()) -> str:
        """A conversation as text, with the next answer opened; a last message of the assistant is left open.

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
        """Whether it shows tools to the policy."""
        return self.render([_QUESTION], tools) != self.render([_QUESTION])

    def between(self, messages: Sequence[Message], new: int, tools: Sequence[Mapping[str, Any]] = ()) -> Between:
        """What stands between the last answer and the next.

        A mark takes the place of the last answer, so that what the policy wrote has no part in it.

        Args:
            messages: The conversation.
            new: How many of the messages, from the end, follow the last answer.
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
        """Refuse a template that shows an answer otherwise than it was sampled, once such messages follow it."""
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
    """How many characters both begin with."""
    return next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))
