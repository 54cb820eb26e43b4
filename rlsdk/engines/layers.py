"""Types of a model's layers, and what the slot cache of the engine `transformers` holds for each."""

from __future__ import annotations

from typing import Any

from rlsdk.errors import EngineError

KINDS = ("linear_attention", "conv", "moe", "mlp")
"""Types of layers with a state, or, in models that list each block as a layer, without a cache."""
_OWN_CACHES = ("bloom", "minimax")
"""Model types that refuse a cache or a mask other than their own."""


def layer_kinds(config: Any) -> list[str]:
    """Return the type of each layer of a text model; the default is attention."""
    return list(getattr(config, "layer_types", None) or ["full_attention"] * config.num_hidden_layers)


def check_layers(config: Any, compiled: bool) -> None:
    """Refuse models with layers that have no cache here.

    Raises:
        EngineError: A layer has an unsupported type, or the model needs a cache of its own.
    """
    if config.model_type in _OWN_CACHES:
        raise EngineError(
            f"model type {config.model_type!r} needs a cache or a mask of its own, which the engine 'transformers' "
            "does not have; use engine=vllm"
        )
    kinds = set(layer_kinds(config))
    if others := sorted(kinds - {"full_attention", "sliding_attention", *KINDS}):
        raise EngineError(
            f"model type {config.model_type!r} has layers of type {', '.join(others)}; the engine 'transformers' runs "
            f"layers of full_attention, sliding_attention, {', '.join(KINDS)}; use engine=vllm"
        )
    if not kinds - set(KINDS):
        raise EngineError(
            f"model type {config.model_type!r} has no attention layer; the engine 'transformers' needs at least "
            "one; use engine=vllm"
        )
    if compiled and (recurrent := sorted(kinds & set(KINDS))):
        raise EngineError(
            f"model type {config.model_type!r} has layers of type {', '.join(recurrent)}, whose states cannot be "
            "compiled; set engine.compile=false"
        )


def token_bytes(config: Any, itemsize: int) -> int:
    """Return the cache bytes per token of a continuation."""
    kinds = layer_kinds(config)
    layers = config.per_layer_config if config.is_heterogeneous else [config] * len(kinds)
    count = 0
    for kind, layer in zip(kinds, layers, strict=True):
        if kind not in KINDS:
            heads = layer.num_attention_heads
            size = getattr(layer, "head_dim", None) or layer.hidden_size // heads
            count += 2 * (getattr(layer, "num_key_value_heads", None) or heads) * size * itemsize
    return count
