"""Tiny random models of popular architectures, built from their config classes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

_SIZES = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "max_position_embeddings": 512,
    "initializer_range": 0.1,
}
_EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 48}
_LATENT = {
    "kv_lora_rank": 512,  # with the rotary size, the one that vLLM's CPU kernel has
    "q_lora_rank": 32,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 32,
    "v_head_dim": 32,
    "head_dim": 64,
    "num_key_value_heads": 2,
    "topk_method": "noaux_tc",  # vLLM reads these two
    "scoring_func": "sigmoid",
}
_LINEAR = {
    "layer_types": ["linear_attention", "full_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 2,
    "linear_key_head_dim": 64,
    "linear_value_head_dim": 64,  # vLLM's CPU kernel has 64 and 128
}

ARCHITECTURES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", {}),
    "qwen2": ("Qwen2Config", {}),
    "qwen3": ("Qwen3Config", {}),
    "qwen3.5": ("Qwen3_5TextConfig", _LINEAR),
    "qwen3-moe": ("Qwen3MoeConfig", {**_EXPERTS, "num_experts": 4}),
    "mixtral": ("MixtralConfig", {"num_local_experts": 4}),
    "deepseek-v3": (
        "DeepseekV3Config",
        {**_EXPERTS, **_LATENT, "n_routed_experts": 4, "n_group": 2, "topk_group": 1, "first_k_dense_replace": 1},
    ),
    "glm4": ("Glm4Config", {}),
    "glm4-moe": ("Glm4MoeConfig", {**_EXPERTS, "n_routed_experts": 4, "first_k_dense_replace": 1}),
    "gpt-oss": ("GptOssConfig", {"num_experts_per_tok": 2, "num_local_experts": 4, "sliding_window": 16}),
    "gemma3": ("Gemma3TextConfig", {"sliding_window": 16, "query_pre_attn_scalar": 32}),
    "phi3": ("Phi3Config", {"num_key_value_heads": 2}),
    "olmo2": ("Olmo2Config", {}),
    "mistral": ("MistralConfig", {"sliding_window": 16}),
    "gpt-neox": ("GPTNeoXConfig", {}),
    "gpt2": ("GPT2Config", {"n_embd": 64, "n_layer": 2, "n_head": 2, "n_positions": 512}),
    "granite": ("GraniteConfig", {"logits_scaling": 2.0}),
    "minicpm3": (
        "MiniCPM3Config",
        {**_LATENT, "kv_lora_rank": 32, "qk_rope_head_dim": 32, "v_head_dim": 64, "dim_model_base": 16},
    ),
    "nemotron-h": (
        "NemotronHConfig",
        {
            "layers_block_type": ["mamba", "attention"],
            "mamba_num_heads": 4,
            "mamba_head_dim": 32,
            "ssm_state_size": 16,
            "n_groups": 2,
        },
    ),
}
"""name -> (class of transformers, its arguments beside those that all share)."""
_WITHOUT = {"gpt2": tuple(_SIZES), "gpt-neox": ("num_key_value_heads", "head_dim")}
"""Sizes that a class does not have: it would keep them in its config, where vLLM reads them."""
MOE = ("qwen3-moe", "mixtral", "deepseek-v3", "glm4-moe", "gpt-oss")


def make(folder: Path, name: str, *, tied: bool = False, dtype: str = "float32", seed: int = 0, **options: Any) -> Any:
    """Write a model and the tokenizer of `rlsdk.nano`.

    Args:
        folder: Target folder.
        name: One of `ARCHITECTURES`.
        tied: Tie the output head to the input embeddings.
        dtype: Dtype of the weights.
        seed: Random seed of the weights.
        **options: Further arguments of the config.

    Returns:
        The model that was saved.
    """
    import torch
    import transformers

    from rlsdk.nano import make_tokenizer

    tokenizer = make_tokenizer(100)
    kind, own = ARCHITECTURES[name]
    build: Callable[..., Any] = getattr(transformers, kind)
    sizes = {key: size for key, size in _SIZES.items() if key not in _WITHOUT.get(name, ())}
    config = build(
        **{**sizes, **own, **options},
        vocab_size=len(tokenizer),
        tie_word_embeddings=tied,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
        bos_token_id=None,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=getattr(torch, dtype))
        model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return model
