"""Text to tokens and back, once each way: what was sampled is never tokenised again."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from rlsdk.contracts import Model
from rlsdk.errors import ConfigError
from rlsdk.types import Message, Task


class Codec:
    """A tokenizer, and how prompts are written with it."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._fast = getattr(tokenizer, "backend_tokenizer", None)
        self._single: dict[str, int | None] = {}

    @classmethod
    def open(cls, model: Model) -> Codec:
        """The tokenizer of a model."""
        from transformers import AutoTokenizer

        path = model.tokenizer or model.path
        return cls(AutoTokenizer.from_pretrained(path, trust_remote_code=model.trust_remote_code))

    def prompt(self, task: Task) -> tuple[tuple[Message, ...], np.ndarray]:
        """The messages of a prompt and its tokens, int64 `[p]`; a last assistant message is left open (a prefill)."""
        if isinstance(task.prompt, str):
            return (Message("user", task.prompt),), self._array(self._tokenizer(task.prompt).input_ids)
        if getattr(self._tokenizer, "chat_template", None) is None:
            says = "is a conversation, but the tokenizer has no chat template; use a text prompt (template 'base')"
            raise ConfigError([f"task {task.id!r} {says}"])
        prefill = task.prompt[-1].role == "assistant"
        ids = self._tokenizer.apply_chat_template(
            [{"role": m.role, "content": m.content} for m in task.prompt],
            add_generation_prompt=not prefill,
            continue_final_message=prefill,
            tokenize=True,
            return_dict=False,
        )
        return task.prompt, self._array(ids)

    def encode(self, text: str) -> np.ndarray:
        """Tokens of an expert's text, int64, without special tokens."""
        return self._array(self._tokenizer(text, add_special_tokens=False).input_ids)

    def decode(self, ids: Sequence[np.ndarray]) -> list[str]:
        """Texts of several sequences, special tokens left out."""
        if self._fast is not None:
            return list(self._fast.decode_batch([i.tolist() for i in ids], skip_special_tokens=True))
        plain = {"skip_special_tokens": True, "clean_up_tokenization_spaces": False}
        return list(self._tokenizer.batch_decode(list(ids), **plain))

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
