"""The texts of single tokens on the page of a rollout."""

from __future__ import annotations

from tokenizers import Tokenizer, decoders, models

from rlsdk.viewer.conversation import Vocabulary

WORDS = ["<unk>", "\u2581the", "\u2581cat", "s", "<0xE2>", "<0x82>", "<0xAC>"]


def test_words_keep_the_space_before_them_and_a_character_of_several_tokens_stands_at_the_last() -> None:
    """Decoders of Llama's and Mistral's tokenizers drop the space at the beginning of what they decode."""
    tokenizer = Tokenizer(models.BPE({word: i for i, word in enumerate(WORDS)}, [], unk_token="<unk>"))
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("\u2581", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    assert Vocabulary(tokenizer).texts([1, 2, 3, 4, 5, 6, 2]) == ["the", " cat", "s", "", "", "\u20ac", " cat"]
