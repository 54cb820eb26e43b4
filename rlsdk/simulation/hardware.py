"""Estimate rates that were not measured from the model size and hardware data sheets."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import attrs

from rlsdk.exact import expert_count

DECODE, PREFILL, TRAIN = 0.6, 0.5, 0.35
"""Achieved share of the data sheet: of bandwidth in decoding, of FLOPs in other passes."""
STATE_BYTES = 16
"""Bytes that the optimiser reads or writes per parameter: gradient, weight and two moments in float32."""
MIXED_BYTES = 4
"""Bytes of a parameter's gradient in the all-reduce between ranks."""


@attrs.frozen(kw_only=True)
class Hardware:
    """Data sheet of an accelerator and its links, for dense bfloat16, per second.

    Attributes:
        flops: Floating-point operations.
        memory: Bytes read from its own memory.
        link: Bytes to another accelerator on the same node, in one direction.
        network: Bytes to another node, per accelerator.
        host: Bytes to or from main memory.
        per_node: Number of accelerators per node.
        decode_overhead: Seconds of a decode step that do not depend on the model: scheduling, launches, sampling.
        sync_overhead: Seconds of a weight sync that do not depend on the model: calls, canary.
    """

    flops: float
    memory: float
    link: float
    network: float
    host: float
    per_node: int = 8
    decode_overhead: float = 0.002
    sync_overhead: float = 0.5


HARDWARE: Mapping[str, Hardware] = {
    "a100": Hardware(flops=312e12, memory=2.0e12, link=300e9, network=25e9, host=25e9),
    "h100": Hardware(flops=989e12, memory=3.35e12, link=450e9, network=50e9, host=50e9),
    "h200": Hardware(flops=989e12, memory=4.8e12, link=450e9, network=50e9, host=50e9),
    "b200": Hardware(flops=2250e12, memory=8.0e12, link=900e9, network=50e9, host=50e9),
    "l40s": Hardware(flops=362e12, memory=0.864e12, link=25e9, network=12.5e9, host=25e9),
    "cpu": Hardware(
        flops=5e10,
        memory=1e10,
        link=5e9,
        network=1.25e9,
        host=5e9,
        per_node=1,
        decode_overhead=0.003,
        sync_overhead=0.02,
    ),
}
"""Data sheets by name; `cpu` is one core, whose figures differ widely."""


@attrs.frozen(kw_only=True)
class ModelSize:
    """Size of a model.

    Attributes:
        parameters: Number of parameters.
        active: Parameters used per token; in a mixture of experts, only those of the chosen experts.
        width: Bytes of a parameter in the engine.
        cache: Bytes of keys and values per token.
    """

    parameters: float
    active: float
    width: int
    cache: float

    @classmethod
    def of(cls, net: Any, width: int) -> ModelSize:
        """Measure a model of transformers, which needs no weights.

        Args:
            net: The model; on torch's meta device it costs no memory.
            width: Bytes of a parameter in the engine.
        """
        from rlsdk.engines.slots import token_bytes

        config = net.config.get_text_config()
        total = experts = 0
        for name, parameter in net.named_parameters():
            total += parameter.numel()
            experts += parameter.numel() if ".experts." in name else 0
        number, chosen = expert_count(config), getattr(config, "num_experts_per_tok", None)
        share = chosen / number if number and chosen else 1.0
        return cls(
            parameters=total,
            active=total - experts * (1 - share),
            width=width,
            cache=float(token_bytes(config, width)),
        )


@attrs.frozen(kw_only=True)
class Work:
    """Computation per token of a step, in addition to sampling.

    Attributes:
        gpus_per_engine: Number of accelerators that share a model in an engine.
        trained: Number of trained models: the policy, and a critic.
        forward: Number of additional forward passes: old logprobs, a reference model, values.
        passes: Number of passes over a batch.
        updates: Number of optimiser steps per batch.
        recomputes: True if the backward pass recomputes activations.
        context: Mean number of tokens in a sequence's cache during sampling.
        colocated: True if engines and learner take turns on the same accelerators.
    """

    gpus_per_engine: int = 1
    trained: int = 1
    forward: int = 0
    passes: int = 1
    updates: int = 1
    recomputes: bool = False
    context: float = 0.0
    colocated: bool = False


def derived(hardware: Hardware, size: ModelSize, work: Work) -> dict[str, Any]:
    """Return the rates, by name, that follow from the model size and the data sheet; other rates depend on neither.

    A decode step reads all weights once, and the keys and values of each sequence. A token costs two operations per
    active parameter in the forward pass and four in the backward pass. The optimiser is memory-bound.

    Args:
        hardware: Data sheet.
        size: Size of the model.
        work: Work of a step.
    """
    memory, flops = hardware.memory * DECODE * work.gpus_per_engine, hardware.flops * work.gpus_per_engine
    weights = size.parameters * size.width
    training = (6 + 2 * work.recomputes) * work.trained * work.passes + 2 * work.forward
    engines_per_node = max(1, hardware.per_node // work.gpus_per_engine)
    switched = (size.parameters * STATE_BYTES * work.trained + weights) / hardware.host
    return {
        "step_seconds": hardware.decode_overhead + weights / memory,
        "sequence_seconds": 2 * size.active / (flops * PREFILL) + size.cache * work.context / memory,
        "prompt_rate": flops * PREFILL / (2 * size.active),
        "token_seconds": training * size.active / (hardware.flops * TRAIN),
        "learner_seconds": work.updates * work.trained * size.parameters * STATE_BYTES / hardware.memory,
        "exchanged_bytes": 2.0 * work.updates * work.trained * size.parameters * MIXED_BYTES,
        "link": hardware.link,
        "network": hardware.network,
        "ranks_per_node": hardware.per_node,
        "switch_seconds": switched if work.colocated else 0.0,
        "sync_seconds": hardware.sync_overhead,
        "weights_bytes": float(weights),
        "bandwidth": hardware.network,
        "engines_per_node": engines_per_node,
    }
