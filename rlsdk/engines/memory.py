"""Memory estimates of engines, from their options and the shapes of the model."""

from __future__ import annotations

from typing import Any

from rlsdk.contracts import ActorSpec, MemoryUse, Model
from rlsdk.contracts.generation import DTYPE_BYTES
from rlsdk.engines.layers import token_bytes

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
