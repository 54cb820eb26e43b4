"""Tokenizers built by tests."""

from __future__ import annotations

import functools
import threading
from typing import Any

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from rlsdk import nano
from rlsdk.rollout.codec import ChatTokenizer

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
def chatml(template: str = CHATML, *, keep_history: bool = False) -> ChatTokenizer:
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
    return ChatTokenizer(tokenizer, keep_history=keep_history)


@functools.cache
def plain() -> ChatTokenizer:
    """The nano model's."""
    return ChatTokenizer(nano.make_tokenizer(100))


class Threads(ChatTokenizer):
    """Records which texts are tokenized, and in which threads."""

    def __init__(self, *arguments: Any, **how: Any) -> None:
        self.seen: list[tuple[int, int]] = []
        super().__init__(*arguments, **how)

    def _ids(self, text: str, *, special: bool = False) -> list[int]:
        self.seen.append((len(text), threading.get_ident()))
        return super()._ids(text, special=special)


def recorded(codec: ChatTokenizer) -> Threads:
    """The same tokenizer, with a record of its work."""
    return Threads(codec.tokenizer, renderer=codec.renderer)


LLAMA = (
    "<|begin_of_text|>"
    "{% if tools %}<|start_header_id|>system<|end_header_id|>\n\n"
    "{% for t in tools %}{{ t | tojson }}\n{% endfor %}<|eot_id|>{% endif %}"
    "{% for m in messages %}<|start_header_id|>{{ m.role }}<|end_header_id|>\n\n{{ m.content }}<|eot_id|>{% endfor %}"
    "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
)
LLAMA_TOKENS = ["<|begin_of_text|>", "<|eot_id|>", "<|eom_id|>"]
LLAMA_TOKENS += ["<|start_header_id|>", "<|end_header_id|>", "<|python_tag|>"]
QWEN = (
    "{% if tools %}<|im_start|>system\n{% for t in tools %}{{ t | tojson }}\n{% endfor %}<|im_end|>\n{% endif %}"
    "{% for m in messages %}<|im_start|>"
    "{% if m.role == 'tool' %}user\n<tool_response>\n{{ m.content }}\n</tool_response>"
    "{% else %}{{ m.role }}\n{{ m.content }}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
QWEN_TOKENS = ["<|endoftext|>", "<|im_end|>", "<|im_start|>"]
QWEN_WORDS = ["<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>"]


@functools.cache
def like(form: str) -> ChatTokenizer:
    """A tokenizer of bytes whose added tokens are those of Llama 3 (all special), or of Qwen 3 (some not special)."""
    from tokenizers import AddedToken

    special, words, template = {
        "llama": (LLAMA_TOKENS, [], LLAMA),
        "qwen": (QWEN_TOKENS, QWEN_WORDS, QWEN),
    }[form]
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    inner = Tokenizer(models.BPE({letter: i for i, letter in enumerate(letters)}, []))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(False, use_regex=False)
    inner.decoder = decoders.ByteLevel()
    inner.add_tokens([AddedToken(name, special=True, normalized=False) for name in special])
    inner.add_tokens([AddedToken(name, special=False, normalized=False) for name in words])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=inner, eos_token=special[1], pad_token=special[0], clean_up_tokenization_spaces=False
    )
    tokenizer.chat_template = template
    tokenizer.name_or_path = f"tests/{form}"
    return ChatTokenizer(tokenizer)
