"""Memory that actors will need, as they tell before anything starts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol, runtime_checkable

import attrs

from rlsdk.contracts.generation import ActorSpec, Model
from rlsdk.contracts.training import Roles


@attrs.frozen
class MemoryUse:
    """Memory of one process for one purpose.

    Attributes:
        role: Purpose, such as `learner weights`.
        bytes: Size.
        on_host: True for main memory, although the process computes on a GPU.
    """

    role: str
    bytes: int
    on_host: bool = False


@attrs.frozen(kw_only=True)
class UpdateShape:
    """Rollouts of one rank at their greatest length: of an optimiser step, or of a batch if nothing is trained.

    Attributes:
        rollouts: Number of rollouts.
        prompt: Tokens of each prompt.
        response: Tokens of each response.
        prompts: Number of different prompts among them.
        free: Bytes that are free for the learner on its device, for options that depend on it; None if unknown.
    """

    rollouts: int
    prompt: int
    response: int
    prompts: int = 1
    free: int | None = None


@runtime_checkable
class EstimatesUpdates(Protocol):
    """Optional interface of a learner that knows how much memory its ranks need."""

    @property
    def memory_remedies(self) -> Sequence[str]:
        """Options that would lower it, as `name=value` or in words; those first that cost least."""
        ...

    def update_memory(self, roles: Roles, place: ActorSpec, shape: UpdateShape) -> Sequence[MemoryUse]:
        """Estimate the greatest memory of a rank, without loading weights; a reference model alone runs forwards only.

        Args:
            roles: Models of the learner; only their configs are read.
            place: Number of ranks, and their device.
            shape: Rollouts of an optimiser step.
        """
        ...


@runtime_checkable
class EstimatesGeneration(Protocol):
    """Optional interface of an engine that knows how much memory it needs."""

    def generation_memory(
        self, model: Model, net: Any, place: ActorSpec, device_bytes: int | None
    ) -> Sequence[MemoryUse]:
        """Estimate the greatest memory of an engine: of each of its GPUs, if it has any.

        Args:
            model: Model to generate with.
            net: The transformers model, without its weights (on torch's meta device).
            place: Device of the engine.
            device_bytes: Memory of one GPU; None if unknown, or on a CPU.
        """
        ...
