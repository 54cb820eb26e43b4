"""Texts of single tokens in the logprobs of an answer."""

from __future__ import annotations

import numpy as np
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from rlsdk.contracts import TopTokens
from rlsdk.rollout.codec import ChatTokenizer
from rlsdk.serving.messages import TokenLogprobs, chat_logprobs, text_logprobs

WORDS = ["<unk>", "\u2581the", "\u2581cat", "s", "a"]


def test_logprobs_name_tokens_with_the_space_before_a_word() -> None:
    """Decoders of Llama's and Mistral's tokenizers drop the space at the beginning of what they decode."""
    inner = Tokenizer(models.BPE({word: i for i, word in enumerate(WORDS)}, [], unk_token="<unk>"))
    inner.decoder = decoders.Sequence([decoders.Replace("\u2581", " "), decoders.Fuse(), decoders.Strip(" ", 1, 0)])
    codec = ChatTokenizer(PreTrainedTokenizerFast(tokenizer_object=inner, clean_up_tokenization_spaces=False))
    ids = np.array([1, 2, 3, 2])
    top = TopTokens(ids[:, None], np.full((4, 1), -0.5, np.float32))
    tokens = TokenLogprobs(ids, np.full(4, -0.5, np.float32), top)

    assert [each["token"] for each in chat_logprobs(codec, tokens)["content"]] == [" the", " cat", "s", " cat"]
    whole = text_logprobs(codec, tokens)
    assert "".join(whole["tokens"]) == codec.decode([ids])[0] == "the cats cat"
    assert whole["text_offset"] == [0, 3, 7, 8]
    assert [list(row) for row in whole["top_logprobs"]] == [[" the"], [" cat"], ["s"], [" cat"]]
    assert text_logprobs(codec, tokens, offset=5)["text_offset"] == [5, 9, 13, 14]
