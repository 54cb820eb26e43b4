"""The codec's tokens are those of the tokenizer's own call."""

from __future__ import annotations

import copy
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from tokenizers.processors import TemplateProcessing

from rlsdk.rollout.codec import CUT, Codec
from rlsdk.types import Message
from tests.rollout.codecs import chatml, plain

LETTERS = st.text(st.characters(exclude_characters=CUT, exclude_categories=["Cs"]))
TEXTS = st.lists(LETTERS | st.sampled_from(["<|im_end|>", "<|im_start|>", "\n"])).map("".join)


def _nano() -> Any:
    return copy.deepcopy(plain()._tokenizer)


def _chatml(**settings: Any) -> Any:
    tokenizer = copy.deepcopy(chatml()._tokenizer)
    for name, value in settings.items():
        setattr(tokenizer, name, value)
    return tokenizer


def _with_beginning() -> Any:
    """One that puts a token before each text, and whose file says that it cuts and pads."""
    tokenizer = _chatml()
    inner = tokenizer.backend_tokenizer
    begin = [("<|im_start|>", inner.token_to_id("<|im_start|>"))]
    inner.post_processor = TemplateProcessing(single="<|im_start|> $A", special_tokens=begin)
    inner.enable_truncation(4)
    inner.enable_padding(length=16)
    return tokenizer


TOKENIZERS = {
    "nano": _nano(),
    "chatml": _chatml(),
    "chatml, special tokens split": _chatml(split_special_tokens=True),
    "with a beginning": _with_beginning(),
}


@pytest.mark.parametrize("name", TOKENIZERS)
@given(text=TEXTS)
@example(text="a conversation<|im_end|>\n<|im_start|>goes on")
def test_tokens_of_a_text_are_those_of_the_tokenizers_call(name: str, text: str) -> None:
    own = copy.deepcopy(TOKENIZERS[name])
    codec = Codec(copy.deepcopy(TOKENIZERS[name]))
    assert codec.encode(text).tolist() == own(text, add_special_tokens=False).input_ids
    assert codec.opening((Message("user", text),), plain=True).tolist() == own(text).input_ids


def test_these_tokenizers_differ_where_the_settings_do() -> None:
    text = "a<|im_end|>"
    found = {
        name: tuple(Codec(copy.deepcopy(t)).opening((Message("user", text),), plain=True))
        for name, t in TOKENIZERS.items()
    }
    assert len(set(found.values())) == len(found)
