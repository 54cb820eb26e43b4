"""Create a small model for machines without an accelerator: config, tokenizer and random weights.

Llama-shaped (Mixtral-shaped with experts), two layers of width 128. Numbers from 0 to `largest` are one token each,
and so are `<answer>` and `</answer>`: a model of this size learns Countdown in minutes if it need not learn to spell
(see docs/quickstart.md).

The config says `model_type: llama`: for type qwen2, transformers silently replaces the pre-tokenizer of a custom
tokenizer, which then splits the numbers.
"""

from __future__ import annotations

from pathlib import Path
from string import ascii_lowercase
from typing import Any

__all__ = [
    "create",
    "make_tokenizer",
    "vocabulary",
]
SYMBOLS = ("+", "-", "*", "/", "(", ")", "=", ",", ">", ":", " ", "\n", "<answer>", "</answer>", "<think>", "</think>")
END = "<eos>"
PAD = "<pad>"
UNKNOWN = "<unk>"


def vocabulary(largest: int, letters: bool = False) -> dict[str, int]:
    """Return token -> id: special tokens, numbers, symbols, and optionally the letters a to z."""
    tokens = [PAD, END, UNKNOWN, *(str(n) for n in range(largest + 1)), *SYMBOLS, *(ascii_lowercase if letters else ())]
    return {token: index for index, token in enumerate(tokens)}


def make_tokenizer(largest: int, letters: bool = False) -> Any:
    """Return a tokenizer with one token per number, symbol and optionally letter; anything else is `<unk>`."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    inner = Tokenizer(models.WordLevel(vocabulary(largest, letters), unk_token=UNKNOWN))
    pattern = r"\d+|</?(?:answer|think)>|[\s\S]"
    inner.pre_tokenizer = pre_tokenizers.Split(Regex(pattern), behavior="isolated")
    inner.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=inner, eos_token=END, pad_token=PAD, unk_token=UNKNOWN, clean_up_tokenization_spaces=False
    )


def create(
    folder: Path,
    *,
    seed: int = 0,
    layers: int = 2,
    hidden: int = 128,
    heads: int = 4,
    intermediate: int = 256,
    largest: int = 100,
    letters: bool = False,
    initializer_range: float = 0.05,
    experts: int = 0,
) -> int:
    """Write a model folder that transformers, vLLM and DeepSpeed can load.

    Args:
        folder: Target folder; created if it does not exist.
        seed: Random seed of the weights.
        layers: Number of transformer layers.
        hidden: Hidden size.
        heads: Number of attention heads.
        intermediate: Width of the feed-forward layers.
        largest: Largest number that is a single token; numbers start at 0.
        letters: Give each letter a to z a token; otherwise letters are `<unk>`.
        initializer_range: Standard deviation of the weights.
        experts: Number of experts per layer, two of them active per token; 0 for a dense model. A model with experts is
            Mixtral-shaped.

    Returns:
        The number of parameters.
    """
    import torch
    from transformers import AutoModelForCausalLM, LlamaConfig, MixtralConfig

    tokenizer = make_tokenizer(largest, letters)
    kind, more = (MixtralConfig, {"num_local_experts": experts}) if experts else (LlamaConfig, {})
    config = kind(
        **more,
        vocab_size=len(tokenizer),
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=heads,
        max_position_embeddings=512,
        initializer_range=initializer_range,
        tie_word_embeddings=True,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
        bos_token_id=None,
    )
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    folder.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return sum(p.numel() for p in model.parameters())
