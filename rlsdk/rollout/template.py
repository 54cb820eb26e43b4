"""Chat templates: the text around the messages of a conversation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

import attrs

from rlsdk.errors import ConfigError
from rlsdk.types import Message

_QUESTION = Message("user", "Q")
_QUESTION_TEXT = "rlsdkquestion"
_THOUGHT, _TEXT = "rlsdkthought", "rlsdkanswer"
_ANSWERS: tuple[Mapping[str, str], ...] = (
    {"content": _TEXT, "reasoning_content": _THOUGHT, "reasoning": _THOUGHT, "thinking": _THOUGHT},
    {"content": f"<think>\n{_THOUGHT}\n</think>\n\n{_TEXT}"},
)
"""An answer with a thought: in a field of its own, under the names that templates use, and within the text."""


@attrs.frozen
class Between:
    """Text that a template writes between an answer and the next one.

    Attributes:
        closing: Text that closes the answer, such as `<|im_end|>` and a line break.
        text: The whole text: `closing`, the new messages, and the header of the next answer.
    """

    closing: str
    text: str


@attrs.frozen
class Rewrite:
    """Text of an answer, from the beginning of its conversation, that a template alters once messages follow it.

    Attributes:
        written_whole: The text as it was written.
        found_whole: The text as it becomes.
    """

    written_whole: str
    found_whole: str

    @property
    def written(self) -> str:
        """The text as it was written, around the first difference."""
        return self.written_whole[self._at : self._at + 50]

    @property
    def found(self) -> str:
        """The text as it becomes, around the first difference."""
        return self.found_whole[self._at : self._at + 50]

    @property
    def drops_thought(self) -> bool:
        """True if nothing but the thought, and marks around it, is left out."""
        if _THOUGHT in self.found_whole or not self.found_whole.endswith(_TEXT):
            return False
        rest = iter(self.written_whole)
        return all(character in rest for character in self.found_whole)

    @property
    def _at(self) -> int:
        return max(0, _alike(self.written_whole, self.found_whole) - 10)


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

    def render_closed(
        self, messages: Sequence[Message | Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] = ()
    ) -> str:
        """Render a conversation that is over: its last message is closed, and no answer opened.

        Args:
            messages: The conversation; a mapping is passed to the template as it is.
            tools: As in `render`.

        Raises:
            ConfigError: The template refuses the conversation.
        """
        return self._render(messages, tools, add_generation_prompt=False)

    def _render(
        self, messages: Sequence[Message | Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] = (), **how: bool
    ) -> str:
        given = [_plain(m) if isinstance(m, Message) else dict(m) for m in messages]
        if self._wants_parts:
            given = [{**m, "content": [{"type": "text", "text": m["content"]}]} for m in given]
        try:
            text: str = self._tokenizer.apply_chat_template(given, tools=list(tools) or None, tokenize=False, **how)
        except Exception as error:
            roles = ", ".join(m.role if isinstance(m, Message) else m["role"] for m in messages)
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
        if rewrite := self.rewrite(roles):
            following = ", ".join(roles) or "assistant"
            raise ConfigError(
                [
                    f"{self._name} rewrites an earlier answer once a message ({following}) follows: "
                    f"{rewrite.written!r} becomes {rewrite.found!r}, which is not what the policy wrote. Let "
                    "model.tokenizer name a folder whose template leaves answers as they are; or set "
                    "model.keep_history, and later turns follow the tokens as they were sampled, thoughts included"
                ]
            )
        self._checked.add(roles)

    def rewrite(self, roles: Sequence[str]) -> Rewrite | None:
        """Compare an answer as the policy writes it with the same answer once messages of these roles follow.

        What the policy writes begins where the generation prompt ends. If that prompt opens a thought, the answer
        continues it; if it closes one, too, the answer has none. The template itself writes the answer, since each
        model has its own form of thoughts.

        Returns:
            The first difference; None if there is none.

        Raises:
            ConfigError: The template refuses the conversation.
        """
        opened, answer = self.render([_QUESTION]), self._answer()
        written = self._up_to_answer([answer])
        if not written.startswith(opened):
            # Thoughts that the template does not write at all, or writes otherwise than the prompt opened them
            written = opened + f"<think>\n{_THOUGHT}\n</think>\n\n{_TEXT}".removeprefix(_thought_begun(opened))
        found = self._up_to_answer([answer, *({"role": role, "content": "R"} for role in roles)])
        return None if found == written else Rewrite(written, found)

    def _answer(self) -> dict[str, str]:
        """Return the message of an answer in the form that the template understands, with a thought if it can."""
        if "</think>" in self.render([_QUESTION])[-20:]:
            return {"role": "assistant", "content": _TEXT}
        for answer in _ANSWERS:
            if _THOUGHT in self._up_to_answer([message := {"role": "assistant", **answer}]):
                return message
        return {"role": "assistant", **_ANSWERS[1]}

    def _up_to_answer(self, following: Sequence[Mapping[str, Any]]) -> str:
        """Render a question and what follows it, up to the end of the first answer's text."""
        text = self._render([_QUESTION, *following], add_generation_prompt=False)
        begin, text_of_answer, _ = text.partition(_TEXT)
        return begin + text_of_answer

    @cached_property
    def _wants_parts(self) -> bool:
        """True for templates of models that see: text is lost unless it stands in a list of parts."""
        forms = (_QUESTION_TEXT, [{"type": "text", "text": _QUESTION_TEXT}])
        shown = []
        for content in forms:
            try:
                text = self._tokenizer.apply_chat_template([{"role": "user", "content": content}], tokenize=False)
            except Exception:  # noqa: BLE001 - a template may raise anything
                return False
            shown.append(_QUESTION_TEXT in text)
        return shown == [False, True]

    @property
    def _name(self) -> str:
        return f"the chat template of {getattr(self._tokenizer, 'name_or_path', '') or 'the tokenizer'!r}"


def _plain(message: Message) -> dict[str, Any]:
    named = {"name": message.name} if message.name else {}
    return {"role": message.role, "content": message.content, **named}


def _alike(one: str, other: str) -> int:
    """Return the length of the common prefix."""
    return next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


def _thought_begun(opened: str) -> str:
    """Return the beginning of a thought with which a generation prompt ends; empty if it opens none."""
    return next((begun for begun in ("<think>\n", "<think>") if opened.endswith(begun)), "")
