"""Tokens of texts and back, where the tokenizer keeps results or chooses between two ways."""

from __future__ import annotations

import numpy as np
import pytest

from rlsdk import nano
from rlsdk.rollout import codec as codec_module
from rlsdk.rollout.codec import ChatTokenizer


def test_few_and_many_tokens_are_decoded_to_the_same_texts(monkeypatch: pytest.MonkeyPatch) -> None:
    codec = ChatTokenizer(nano.make_tokenizer(100))
    sequences = [codec.encode(text) for text in ("3 + 4", "", "<answer>12</answer>", "x" * 50)]
    few = codec.decode(sequences)
    monkeypatch.setattr(codec_module, "_PARALLEL", 0)
    assert codec.decode(sequences) == few
    assert few[2] == "<answer>12</answer>"


def test_tokens_of_a_text_are_kept_read_only_for_a_limited_number_of_texts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(codec_module, "_KEPT_TEXTS", 3)
    codec, other = (ChatTokenizer(nano.make_tokenizer(100)) for _ in range(2))
    texts = [f"{i} + {i}" for i in range(8)]
    first = [codec.encode(text) for text in texts]
    assert len(codec._kept) <= 3
    assert codec.encode(texts[-1]) is first[-1]
    assert not first[-1].flags.writeable
    for text, ids in zip(texts, first, strict=True):
        np.testing.assert_array_equal(codec.encode(text), ids)
        np.testing.assert_array_equal(other.encode(text), ids)


def test_the_tokens_of_a_long_text_are_not_kept() -> None:
    codec = ChatTokenizer(nano.make_tokenizer(100))
    codec.encode("7" * 5_000)
    assert not codec._kept


def test_stop_strings_are_remembered_for_a_limited_number_of_texts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(codec_module, "_KEPT_TEXTS", 3)
    codec = ChatTokenizer(nano.make_tokenizer(100))
    stops = [f"stop {i}" for i in range(8)]
    assert codec.split_stops(stops)[0] == tuple(stops)
    assert len(codec._single) <= 3
