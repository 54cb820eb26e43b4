"""Speeds of engines and learner, and response lengths: given by the user, measured in a run, or from data sheets."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import attrs
import numpy as np

from rlsdk.engines.memory import token_bytes
from rlsdk.errors import ValueFault
from rlsdk.exact import expert_count


def _positive(instance: object, attribute: attrs.Attribute[Any], value: float) -> None:
    if not 0 < value < math.inf:
        finite = " and finite" if value == math.inf else ""
        raise ValueFault(f"{attribute.name} must be above 0{finite}; got {value:g}")


def _not_negative(instance: object, attribute: attrs.Attribute[Any], value: float) -> None:
    if not 0 <= value < math.inf:
        finite = " and finite" if value == math.inf else ""
        raise ValueFault(f"{attribute.name} must be at least 0{finite}; got {value:g}")


def _share(instance: object, attribute: attrs.Attribute[Any], value: float) -> None:
    if not 0 <= value <= 1:
        raise ValueFault(f"{attribute.name} must be from 0 to 1; got {value:g}")


@attrs.frozen(kw_only=True)
class Rates:
    """Speeds of the parts. `derived` estimates them from a model's size, `measure` from a run.

    An engine samples one token of each running sequence in `step_seconds + running * sequence_seconds`. The learner
    needs `learner_seconds + tokens * token_seconds / (1 + (ranks - 1) * efficiency)` for a batch, and the time in which
    its ranks add up gradients. A sync of weights takes `sync_seconds` and the transfer, in which engines generate
    nothing. The driver serves one rollout at a time.

    Attributes:
        step_seconds: Fixed seconds of a decode step, however many sequences run: reading the weights.
        sequence_seconds: Additional seconds of a decode step for each running sequence.
        slots: Maximum number of sequences that run in an engine; others wait.
        prompt_tokens: Tokens of a prompt; it is read once for the rollouts of a group.
        prompt_rate: Tokens that an engine reads per second: of prompts, of continued answers, and after a sync of all
            running sequences.
        score_seconds: Time from the last token of a group to its score.
        driver_seconds: Seconds per rollout in the process that makes it: the driver or a rollout worker.
        ledger_seconds: Seconds per rollout in the driver if rollout workers make it.
        token_seconds: Learner seconds per response token on one rank, for all passes.
        learner_seconds: Fixed learner seconds per batch.
        efficiency: Speedup by each additional learner rank, relative to the first.
        exchanged_bytes: Bytes of gradients and weights that ranks exchange for a batch, twice their sum for many ranks.
        link: Bytes per second between two ranks of a node.
        network: Bytes per second of a rank to another node.
        ranks_per_node: Ranks of the learner that share a node.
        switch_seconds: Seconds per batch in which learner and engines hand over shared devices.
        sync_seconds: Fixed seconds of a sync.
        weights_bytes: Bytes sent to each node with engines.
        bandwidth: Bytes per second to a node.
        engines_per_node: Engines that share a node; its copy of the weights serves them all.
        relayed: True if a node passes weights on while it receives them, so that all have them at about the same time;
            False if each round doubles the nodes that have them.
        filtered: Share of groups dropped by filters.
    """

    step_seconds: float = attrs.field(default=0.012, validator=_not_negative)
    sequence_seconds: float = attrs.field(default=5e-5, validator=_not_negative)
    slots: int = attrs.field(default=256, validator=_positive)
    prompt_tokens: int = attrs.field(default=256, validator=_not_negative)
    prompt_rate: float = attrs.field(default=20_000.0, validator=_positive)
    score_seconds: float = attrs.field(default=0.05, validator=_not_negative)
    driver_seconds: float = attrs.field(default=0.0, validator=_not_negative)
    ledger_seconds: float = attrs.field(default=0.0, validator=_not_negative)
    token_seconds: float = attrs.field(default=1.2e-4, validator=_not_negative)
    learner_seconds: float = attrs.field(default=2.0, validator=_not_negative)
    efficiency: float = attrs.field(default=0.9, validator=_not_negative)
    exchanged_bytes: float = attrs.field(default=0.0, validator=_not_negative)
    link: float = attrs.field(default=1e11, validator=_positive)
    network: float = attrs.field(default=1e10, validator=_positive)
    ranks_per_node: int = attrs.field(default=8, validator=_positive)
    switch_seconds: float = attrs.field(default=0.0, validator=_not_negative)
    sync_seconds: float = attrs.field(default=1.0, validator=_not_negative)
    weights_bytes: float = attrs.field(default=1.52e10, validator=_not_negative)
    bandwidth: float = attrs.field(default=1e10, validator=_positive)
    engines_per_node: int = attrs.field(default=8, validator=_positive)
    relayed: bool = attrs.field(default=False, converter=bool)
    filtered: float = attrs.field(default=0.0, validator=_share)

    def decode(self, running: int) -> float:
        """Return the seconds of a decode step with this many sequences."""
        return self.step_seconds + running * self.sequence_seconds

    def learn(self, tokens: float, ranks: int) -> float:
        """Return the seconds of the learner for a batch with this many response tokens."""
        speedup = 1 + (ranks - 1) * self.efficiency
        return self.learner_seconds + tokens * self.token_seconds / speedup + self.exchange(ranks)

    def exchange(self, ranks: int) -> float:
        """Return the seconds of a batch in which ranks exchange gradients, in a ring as fast as its slowest link."""
        slowest = self.link if ranks <= self.ranks_per_node else min(self.link, self.network)
        return self.exchanged_bytes * (ranks - 1) / ranks / slowest

    def nodes(self, engines: int) -> int:
        """Return the number of nodes that so many engines fill."""
        return math.ceil(engines / self.engines_per_node)

    def transfer(self, engines: int) -> float:
        """Return the seconds in which engines load weights and generate nothing."""
        rounds = 1 if self.relayed else math.ceil(math.log2(self.nodes(engines) + 1))
        return rounds * self.weights_bytes / self.bandwidth


@attrs.frozen(kw_only=True)
class Lengths:
    """Tokens of responses: log-normal, `median * exp(sigma * z)` with a standard normal z, cut off at the limit.

    A `sigma` of 1 gives the long tail of reasoning models: one response in twenty exceeds five times the median.

    Attributes:
        median: Median of the distribution before it is cut off.
        sigma: Standard deviation of the logarithm.
        limit: Maximum length; longer responses are truncated.
        seen: Lengths to draw from instead, if any.
    """

    median: float = attrs.field(default=1000.0, validator=_positive)
    sigma: float = attrs.field(default=1.0, validator=_not_negative)
    limit: int = attrs.field(default=16_384, validator=[_positive, attrs.validators.le(1 << 20)])
    seen: tuple[int, ...] = ()

    def draw(self, generator: np.random.Generator, count: int) -> list[int]:
        """Draw the lengths of responses, each at least 1."""
        if self.seen:
            drawn = generator.choice(np.array(self.seen), count)
        else:
            drawn = self.median * np.exp(self.sigma * generator.standard_normal(count))
        found: list[int] = np.clip(np.rint(drawn), 1, self.limit).astype(int).tolist()
        return found


DECODE, PREFILL, TRAIN = 0.6, 0.5, 0.35
"""Achieved share of the data sheet: of bandwidth in decoding, of FLOPs in other passes."""
WEIGHT_BYTES = 8
"""Bytes that the optimiser reads or writes per parameter besides its state: gradient and weight in float32."""
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
        state_bytes: Bytes of the optimiser's state per parameter; AdamW has two moments in float32.
        context: Mean number of tokens in a sequence's cache during sampling.
        colocated: True if engines and learner take turns on the same accelerators.
    """

    gpus_per_engine: int = 1
    trained: int = 1
    forward: int = 0
    passes: int = 1
    updates: int = 1
    recomputes: bool = False
    state_bytes: float = 8.0
    context: float = 0.0
    colocated: bool = False


def derived(hardware: Hardware, size: ModelSize, work: Work) -> dict[str, Any]:
    """Return the rates, by name, that follow from the model size and the data sheet; other rates depend on neither.

    A decode step reads all weights once, and the keys and values of each sequence. A token costs two operations per
    active parameter in the forward pass and four in the backward pass. The optimiser is memory-bound.
    """
    memory, flops = hardware.memory * DECODE * work.gpus_per_engine, hardware.flops * work.gpus_per_engine
    weights = size.parameters * size.width
    training = (6 + 2 * work.recomputes) * work.trained * work.passes + 2 * work.forward
    engines_per_node = max(1, hardware.per_node // work.gpus_per_engine)
    optimised = work.trained * size.parameters * (WEIGHT_BYTES + work.state_bytes)
    switched = (optimised + weights) / hardware.host
    return {
        "step_seconds": hardware.decode_overhead + weights / memory,
        "sequence_seconds": 2 * size.active / (flops * PREFILL) + size.cache * work.context / memory,
        "prompt_rate": flops * PREFILL / (2 * size.active),
        "token_seconds": training * size.active / (hardware.flops * TRAIN),
        "learner_seconds": work.updates * optimised / hardware.memory,
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
