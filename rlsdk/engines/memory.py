"""Memory estimates of engines, from their options and the shapes of the model."""

from __future__ import annotations

from typing import Any

from rlsdk.contracts import ActorSpec, MemoryUse, Model
from rlsdk.contracts.generation import DTYPE_BYTES

PROCESS_BYTES = 400 * 2**20
"""Memory of an engine's process without a model: Python, torch and Ray."""
VLLM_PROCESS_BYTES = 1200 * 2**20
"""Memory of an engine's process with vLLM, without a model."""


def transformers_memory(
    model: Model, net: Any, place: ActorSpec, *, max_num_seqs: int, kv_cache_gib: float
) -> tuple[MemoryUse, ...]:
    """Estimate the peak memory of the engine `transformers`."""
    from rlsdk.engines.slots import token_bytes

    full = max_num_seqs * model.max_length * token_bytes(net.config.get_text_config(), DTYPE_BYTES[model.dtype])
    return _uses(_weights(model, net), min(full, int(kv_cache_gib * 2**30)), PROCESS_BYTES, place)


def vllm_memory(
    model: Model, net: Any, place: ActorSpec, *, kv_cache_gib: int, gpus: int, room: int
) -> tuple[MemoryUse, ...]:
    """Estimate the memory of vLLM; on each GPU, the KV cache takes the part of `room` that the weights leave.

    On a CPU, each process that shares the model has its own KV cache.
    """
    weights = _weights(model, net)
    processes = (gpus + (gpus > 1)) * VLLM_PROCESS_BYTES  # one more process runs the scheduler
    if place.device == "cpu":
        return _uses(weights, gpus * kv_cache_gib * 2**30, processes, place)
    own = weights // gpus
    return _uses(own, max(0, room - own), processes, place, sharing=gpus)


def _weights(model: Model, net: Any) -> int:
    count: int = sum(p.numel() for p in net.parameters())
    return count * DTYPE_BYTES[model.dtype]


def _uses(weights: int, cache: int, process: int, place: ActorSpec, sharing: int = 1) -> tuple[MemoryUse, ...]:
    on_gpu = place.device != "cpu"
    # While the learner works on their GPUs, engines keep their weights in main memory.
    asleep = (
        [MemoryUse("sleeping engine weights", weights * sharing, on_host=True)] if on_gpu and place.colocated else []
    )
    return (
        MemoryUse("engine weights", weights, turn="generate"),
        MemoryUse("engine KV cache", cache, turn="generate"),
        MemoryUse("engine process", process, on_host=on_gpu),
        *asleep,
    )
