"""Tokenizers that tests make themselves."""

from __future__ import annotations

import functools

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from rlsdk import nano
from rlsdk.rollout.codec import Codec

CHATML = (
    "{% if tools %}<|im_start|>system\n{% for t in tools %}{{ t.function.name }} {% endfor %}<|im_end|>\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
FORGETFUL = CHATML.replace(
    "{{ m.content }}",
    "{{ m.content.split('</think>')[-1].lstrip() if m.role == 'assistant' and not loop.last else m.content }}",
)
"""As Qwen3's: thoughts of earlier answers are dropped."""


@functools.cache
def chatml(template: str = CHATML, *, keep_history: bool = False) -> Codec:
    """A tokenizer of bytes and a few words, whose end of text is `<|im_end|>`."""
    special = ["<pad>", "<|im_end|>", "<|im_start|>"]
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [("i", "n"), ("Ċ", "Ċ"), ("o", "Ċ")]  # they join letters across the borders of turns, as real ones do
    words = [*special, *letters, *("".join(pair) for pair in merges)]
    inner = Tokenizer(models.BPE({word: i for i, word in enumerate(words)}, merges))
    inner.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex(r"\s*\S+\n*|\s+"), "isolated"), pre_tokenizers.ByteLevel(False, use_regex=False)]
    )
    inner.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=inner,
        eos_token="<|im_end|>",
        pad_token="<pad>",
        additional_special_tokens=["<|im_start|>"],
        clean_up_tokenization_spaces=False,
    )
    tokenizer.chat_template = template
    tokenizer.name_or_path = "tests/chatml"
    return Codec(tokenizer, keep_history=keep_history)


@functools.cache
def plain() -> Codec:
    """The nano model's."""
    return Codec(nano.make_tokenizer(100))
