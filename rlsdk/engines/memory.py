"""Memory that an engine will need, from its options and the shapes of its model."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rlsdk.contracts import ActorSpec, MemoryUse, Model

if TYPE_CHECKING:
    from rlsdk.engines.transformers import Transformers
    from rlsdk.engines.vllm import Vllm

PROCESS_BYTES = 400 * 2**20
"""Memory of an engine's process without a model: Python, torch and Ray."""
VLLM_PROCESS_BYTES = 1200 * 2**20
"""The same with vLLM."""


def transformers_memory(options: Transformers, model: Model, net: Any, place: ActorSpec) -> tuple[MemoryUse, ...]:
    """Estimate the memory of the engine `transformers` at its greatest."""
    from rlsdk.engines.slots import token_bytes

    width = 4 if model.dtype == "float32" else 2
    full = options.max_num_seqs * model.max_length * token_bytes(net.config.get_text_config(), width)
    cache = min(full, int(options.kv_cache_gib * 2**30))
    return _uses(_weights(model, net), cache, PROCESS_BYTES, place)


def vllm_memory(
    options: Vllm, model: Model, net: Any, place: ActorSpec, device_bytes: int | None
) -> tuple[MemoryUse, ...]:
    """Estimate the memory of vLLM; on each of its GPUs, the KV cache gets what the weights leave of its share."""
    if place.device == "cpu":
        return _uses(_weights(model, net), options.kv_cache_gib * 2**30, VLLM_PROCESS_BYTES, place)
    weights = _weights(model, net) // options.tensor_parallel_size
    cache = max(0, int(options.gpu_memory_utilization * (device_bytes or 0)) - weights)
    return _uses(weights, cache, VLLM_PROCESS_BYTES, place)


def _weights(model: Model, net: Any) -> int:
    count: int = sum(p.numel() for p in net.parameters())
    return count * (4 if model.dtype == "float32" else 2)


def _uses(weights: int, cache: int, process: int, place: ActorSpec) -> tuple[MemoryUse, ...]:
    return (
        MemoryUse("engine weights", weights),
        MemoryUse("engine KV cache", cache),
        MemoryUse("engine process", process, on_host=place.device != "cpu"),
    )
