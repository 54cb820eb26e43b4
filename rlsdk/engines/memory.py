"""Types of a model's layers, what the engine `transformers` caches for each, and estimates of the memory of engines."""

from __future__ import annotations

from typing import Any

from rlsdk.contracts import ActorSpec, MemoryUse, Model
from rlsdk.contracts.generation import DTYPE_BYTES
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


PROCESS_BYTES = 400 * 2**20
"""Memory of an engine's process without a model: Python, torch and Ray."""
VLLM_PROCESS_BYTES = 1200 * 2**20
"""Memory of an engine's process with vLLM, without a model."""


def transformers_memory(
    model: Model, net: Any, place: ActorSpec, *, max_num_seqs: int, kv_cache_gib: float
) -> tuple[MemoryUse, ...]:
    """Estimate the peak memory of the engine `transformers`."""
    full = max_num_seqs * model.max_length * token_bytes(net.config.get_text_config(), DTYPE_BYTES[model.dtype])
    weights = _weights(model, net)
    return _uses(weights, min(full, int(kv_cache_gib * 2**30)), PROCESS_BYTES, place, weights)


def vllm_memory(
    model: Model, net: Any, place: ActorSpec, *, kv_cache_gib: int, gpus: int, room: int, adapter: bool
) -> tuple[MemoryUse, ...]:
    """Estimate the memory of vLLM; on each GPU, the KV cache takes the part of `room` that the weights leave.

    On a CPU, each process that shares the model has its own KV cache. An engine that sleeps keeps the base model of an
    adapter, and discards a whole model.
    """
    weights = _weights(model, net)
    processes = (gpus + (gpus > 1)) * VLLM_PROCESS_BYTES  # one more process runs the scheduler
    if place.device == "cpu":
        return _uses(weights, gpus * kv_cache_gib * 2**30, processes, place)
    own = weights // gpus
    return _uses(own, max(0, room - own), processes, place, asleep=own * gpus if adapter else 0)


def _weights(model: Model, net: Any) -> int:
    count: int = sum(p.numel() for p in net.parameters())
    return count * DTYPE_BYTES[model.dtype]


def _uses(weights: int, cache: int, process: int, place: ActorSpec, asleep: int = 0) -> tuple[MemoryUse, ...]:
    """Return the rows of an engine; `asleep` are the weights in main memory while the learner works on its GPUs."""
    on_gpu = place.device != "cpu"
    kept = asleep if on_gpu and place.colocated else 0
    return (
        MemoryUse("engine weights", weights, turn="generate"),
        MemoryUse("engine KV cache", cache, turn="sample"),
        MemoryUse("engine process", process, on_host=on_gpu),
        *([MemoryUse("sleeping engine weights", kept, on_host=True)] if kept else []),
    )
