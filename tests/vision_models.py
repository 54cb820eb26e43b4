"""Tiny random vision-language models, each with a tokenizer and an image processor."""

from __future__ import annotations

from pathlib import Path
from typing import Any

KINDS = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "gemma3")
_QWEN_TOKENS = (
    "<|im_start|>",
    "<|im_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|image_pad|>",
    "<|video_pad|>",
)
_GEMMA_TOKENS = ("<start_of_turn>", "<end_of_turn>", "<start_of_image>", "<end_of_image>", "<image_soft_token>")
_ROLES = ("system", "user", "assistant", "model")
_PARTS = (
    "{% if m.content is string %}{{ m.content }}{% else %}{% for p in m.content %}"
    "{% if p.type == 'image' %}IMAGE{% else %}{{ p.text }}{% endif %}{% endfor %}{% endif %}"
)
_QWEN_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    + _PARTS.replace("IMAGE", "<|vision_start|><|image_pad|><|vision_end|>")
    + "{% if not loop.last or m.role != 'assistant' or not continue_final_message %}<|im_end|>\n{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
_GEMMA_TEMPLATE = (
    "{% for m in messages %}<start_of_turn>{{ 'model' if m.role == 'assistant' else m.role }}\n"
    + _PARTS.replace("IMAGE", "<start_of_image>")
    + "{% if not loop.last or m.role != 'assistant' or not continue_final_message %}<end_of_turn>\n{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}"
)
_TEXT = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 1024,
    "initializer_range": 0.1,
}


def make(folder: Path, kind: str, *, seed: int = 0, tied: bool = False, dtype: str = "float32") -> Any:
    """Write a model, its tokenizer and its image processor; an image has four tokens or, of 56 pixels and more, more.

    Args:
        folder: Target folder.
        kind: One of `KINDS`.
        seed: Random seed of the weights.
        tied: Tie the output head to the input embeddings.
        dtype: Dtype of the weights.

    Returns:
        The model that was saved.
    """
    import torch
    from transformers import AutoModelForImageTextToText

    tokenizer = make_tokenizer(kind)
    config = _gemma(tokenizer, tied) if kind == "gemma3" else _qwen(kind, tokenizer, tied)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForImageTextToText.from_config(config, dtype=getattr(torch, dtype))
        if kind == "gemma3":  # transformers begins with zeros, and an image would change nothing
            torch.nn.init.normal_(model.model.multi_modal_projector.mm_input_projection_weight, std=0.5)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    make_processor(kind).save_pretrained(folder)
    return model


def make_tokenizer(kind: str) -> Any:
    """Return the words of `rlsdk.nano`, roles, and the control tokens of a kind, with a template that shows images."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    from rlsdk.nano import END, PAD, UNKNOWN, vocabulary

    words = vocabulary(100)
    added = _GEMMA_TOKENS if kind == "gemma3" else _QWEN_TOKENS
    for word in (*_ROLES, *added):
        words.setdefault(word, len(words))
    inner = Tokenizer(models.WordLevel(words, unk_token=UNKNOWN))
    pattern = rf"\d+|</?(?:answer|think)>|(?:{'|'.join(_ROLES)})|[\s\S]"
    inner.pre_tokenizer = pre_tokenizers.Split(Regex(pattern), behavior="isolated")
    inner.decoder = decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=inner,
        eos_token=END,
        pad_token=PAD,
        unk_token=UNKNOWN,
        additional_special_tokens=list(added),
        clean_up_tokenization_spaces=False,
    )
    tokenizer.chat_template = _GEMMA_TEMPLATE if kind == "gemma3" else _QWEN_TEMPLATE
    return tokenizer


def make_processor(kind: str) -> Any:
    """Return the image processor of a kind, computed by PIL."""
    from transformers import Gemma3ImageProcessorPil, Qwen2VLImageProcessorPil

    if kind == "gemma3":
        return Gemma3ImageProcessorPil(size={"height": 28, "width": 28})
    return Qwen2VLImageProcessorPil(patch_size=7, merge_size=2, min_pixels=28 * 28, max_pixels=28 * 42)


def _ids(tokenizer: Any) -> dict[str, int]:
    return {"pad_token_id": tokenizer.pad_token_id, "eos_token_id": tokenizer.eos_token_id, "bos_token_id": None}


_QWEN_VISION = {
    "qwen2_vl": {"depth": 2, "embed_dim": 32, "hidden_size": 64, "mlp_ratio": 2},
    "qwen2_5_vl": {
        "depth": 2,
        "hidden_size": 32,
        "intermediate_size": 64,
        "out_hidden_size": 64,
        "window_size": 28,
        "fullatt_block_indexes": [1],
    },
    "qwen3_vl": {
        "depth": 2,
        "hidden_size": 32,
        "intermediate_size": 64,
        "out_hidden_size": 64,
        "num_position_embeddings": 36,
        "deepstack_visual_indexes": [0, 1],
    },
}


def _qwen(kind: str, tokenizer: Any, tied: bool) -> Any:
    from transformers import AutoConfig

    known = tokenizer.convert_tokens_to_ids
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [4, 6, 6]}
    if kind == "qwen3_vl":
        rope["mrope_interleaved"] = True
    text = {
        **_TEXT,
        "head_dim": 32,
        "vocab_size": len(tokenizer),
        "rope_parameters": rope,
        "tie_word_embeddings": tied,
        **_ids(tokenizer),
    }
    return AutoConfig.for_model(
        kind,
        text_config=text,
        vision_config={**_QWEN_VISION[kind], "num_heads": 2, "patch_size": 7, "initializer_range": 0.1},
        image_token_id=known("<|image_pad|>"),
        video_token_id=known("<|video_pad|>"),
        vision_start_token_id=known("<|vision_start|>"),
        vision_end_token_id=known("<|vision_end|>"),
        tie_word_embeddings=tied,
        **_ids(tokenizer),
    )


def _gemma(tokenizer: Any, tied: bool) -> Any:
    from transformers import Gemma3Config

    known = tokenizer.convert_tokens_to_ids
    vision = {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "image_size": 28,
        "patch_size": 7,
        "vision_use_head": False,
    }
    text = {
        **_TEXT,
        "head_dim": 32,
        "vocab_size": len(tokenizer),
        "sliding_window": 16,
        "layer_types": ["sliding_attention", "full_attention"],
        "query_pre_attn_scalar": 32,
        "tie_word_embeddings": tied,
        **_ids(tokenizer),
    }
    return Gemma3Config(
        text_config=text,
        vision_config=vision,
        mm_tokens_per_image=4,
        boi_token_index=known("<start_of_image>"),
        eoi_token_index=known("<end_of_image>"),
        image_token_index=known("<image_soft_token>"),
        initializer_range=0.1,
        tie_word_embeddings=tied,
        **_ids(tokenizer),
    )
