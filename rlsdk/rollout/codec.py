"""Text to tokens and back, once each way: what was sampled is never tokenised again."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import attrs
import numpy as np
import regex

from rlsdk.contracts import Model
from rlsdk.errors import ConfigError
from rlsdk.rollout.template import Template
from rlsdk.types import Message, Task

NOTHING = np.empty(0, np.int64)
NOTHING.setflags(write=False)
CUT = "\ufdd0"
"""Where a text is cut before it is tokenised: a character that Unicode keeps for programs, and no text holds."""


class Codec:
    """A tokenizer, and how conversations are written with it.

    A prompt of messages is written with the tokenizer's chat template. A prompt that is text stays text: what is said
    later follows as it is, behind a separator.
    """

    def __init__(self, tokenizer: Any, *, separator: str = "\n", keep_history: bool = False) -> None:
        """Make one.

        Args:
            tokenizer: Of transformers.
            separator: Stands before each message of a conversation that began as text.
            keep_history: Go on where the chat template would rewrite earlier answers; else that is an error.
        """
        self.separator = separator
        self.template = Template(tokenizer, keep_history=keep_history)
        self._tokenizer = tokenizer
        self._fast = getattr(tokenizer, "backend_tokenizer", None)
        self._single: dict[str, int | None] = {}
        names = sorted(s for s in getattr(tokenizer, "all_special_tokens", ()) if len(s) > 1)
        self._controls = regex.compile("|".join(map(regex.escape, names))) if names else None

    @classmethod
    def open(cls, model: Model) -> Codec:
        """The tokenizer of a model."""
        from transformers import AutoTokenizer

        path = model.tokenizer or model.path
        tokenizer = AutoTokenizer.from_pretrained(path, trust_remote_code=model.trust_remote_code)
        return cls(tokenizer, separator=model.separator, keep_history=model.keep_history)

    def prompt(self, task: Task) -> tuple[tuple[Message, ...], np.ndarray]:
        """The messages of a prompt and its tokens, int64 `[p]`; a last assistant message is left open (a prefill)."""
        if isinstance(task.prompt, str):
            messages: tuple[Message, ...] = (Message("user", task.prompt),)
            return messages, self.opening(messages, plain=True)
        if not self.template.there:
            says = "is a conversation, but the tokenizer has no chat template; use a text prompt (template 'base')"
            raise ConfigError([f"task {task.id!r} {says}"])
        return task.prompt, self.opening(task.prompt, plain=False)

    def opening(
        self, messages: Sequence[Message], *, plain: bool, tools: Sequence[Mapping[str, Any]] = ()
    ) -> np.ndarray:
        """Tokens of all that stands before the first answer, int64 `[p]`.

        Args:
            messages: The conversation so far; nothing in it was sampled.
            plain: The conversation began as text.
            tools: JSON schemas of functions that the template shows.
        """
        if plain:
            text = self.separator.join(m.content for m in messages if m.content)
            begin, _, more = text.partition(CUT)
            return self._array([*self._tokenizer(begin).input_ids, *self.encode(more)])
        return self.encode(self.template.render(messages, tools))

    def between(
        self,
        messages: Sequence[Message],
        new: int,
        *,
        plain: bool,
        ended: np.ndarray = NOTHING,
        tools: Sequence[Mapping[str, Any]] = (),
    ) -> np.ndarray:
        """Tokens between the last answer and the next, int64 `[k]`: its closing, the new messages, the next opening.

        Args:
            messages: The conversation.
            new: How many of the messages, from the end, follow the last answer.
            plain: The conversation began as text: there is nothing to close and to open.
            ended: Tokens of the last answer if it ended by itself: what it sampled of the closing is not added again.
            tools: JSON schemas of functions that the template shows.

        Raises:
            ConfigError: The chat template refuses the messages, or rewrites earlier answers.
        """
        if plain:
            return self.encode("".join(self.separator + m.content for m in messages[len(messages) - new :]))
        written = self.template.between(messages, new, tools)
        ids, closing = self.encode(written.text), self.encode(written.closing)
        for count in range(min(len(closing), len(ended)), 0, -1):
            if np.array_equal(ids[:count], ended[len(ended) - count :]):
                return ids[count:]
        return ids

    def encode(self, text: str) -> np.ndarray:
        """Tokens of a text that stands within a conversation, int64; no special tokens are added."""
        if not text:
            return NOTHING
        pieces = [self._tokenizer(piece, add_special_tokens=False).input_ids for piece in text.split(CUT) if piece]
        return self._array([token for piece in pieces for token in piece])

    def as_data(self, text: str) -> str:
        """A text in which the names of special tokens are mere characters once it is tokenised.

        What an environment shows or a tool returns could otherwise end its own turn and speak as somebody else.
        """
        text = text.replace(CUT, "\N{REPLACEMENT CHARACTER}")
        if self._controls is None:
            return text
        cuts = [0, *(m.start() + 1 for m in self._controls.finditer(text, overlapped=True)), len(text)]
        return CUT.join(text[a:b] for a, b in itertools.pairwise(cuts))

    @staticmethod
    def readable(message: Message) -> Message:
        """A message without the cuts of `as_data`."""
        if CUT not in message.content and CUT not in message.name:
            return message
        return attrs.evolve(message, content=message.content.replace(CUT, ""), name=message.name.replace(CUT, ""))

    def decode(self, ids: Sequence[np.ndarray]) -> list[str]:
        """Texts of several sequences, special tokens left out."""
        if self._fast is not None:
            return list(self._fast.decode_batch([i.tolist() for i in ids], skip_special_tokens=True))
        plain = {"skip_special_tokens": True, "clean_up_tokenization_spaces": False}
        return list(self._tokenizer.batch_decode(list(ids), **plain))

    def shown(self, ids: np.ndarray) -> str:
        """The text of tokens for a person, special tokens included."""
        text: str = self._tokenizer.decode(ids.tolist(), skip_special_tokens=False)
        return text

    @property
    def end(self) -> int | None:
        """The token that ends a text."""
        end: int | None = self._tokenizer.eos_token_id
        return end

    def split_stops(self, stops: Sequence[str]) -> tuple[tuple[str, ...], tuple[int, ...]]:
        """Stop strings that are one token become token ids, which costs an engine nothing; the rest stay strings."""
        ids = {s: self._as_one_token(s) for s in stops}
        return tuple(s for s in stops if ids[s] is None), tuple(i for i in ids.values() if i is not None)

    def _as_one_token(self, text: str) -> int | None:
        if text not in self._single:
            ids = self._tokenizer(text, add_special_tokens=False).input_ids
            added = getattr(self._tokenizer, "added_tokens_encoder", {})
            vocabulary = self._tokenizer.get_vocab()
            # Only a token that no other token contains: '>' may hide inside '</a>' or '>>'
            alone = len(ids) == 1 and (text in added or sum(text in token for token in vocabulary) == 1)
            self._single[text] = ids[0] if alone else None
        return self._single[text]

    @staticmethod
    def _array(ids: Any) -> np.ndarray:
        array = np.asarray(ids, dtype=np.int64)
        array.setflags(write=False)
        return array
