"""A tokenizer for checks: any text is its bytes, beside the control tokens of ChatML."""

from __future__ import annotations

import functools
from typing import Any

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
    "{% if not (loop.last and continue_final_message) %}<|im_end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@functools.cache
def make_chat_tokenizer() -> Any:
    """Make the tokenizer; its chat template is ChatML, and its end of text `<|im_end|>`.

    Raises:
        ImportError: transformers is not installed.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    inner = Tokenizer(models.BPE({letter: i for i, letter in enumerate(letters)}, []))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    inner.decoder = decoders.ByteLevel()
    made = PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="<|im_end|>", pad_token="<pad>")
    made.add_tokens(["<|im_start|>", "<|im_end|>", "<tool_call>", "</tool_call>"], special_tokens=True)
    made.chat_template = CHATML
    return made
