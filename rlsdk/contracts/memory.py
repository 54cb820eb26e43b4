"""Memory estimates that learners and engines give before a run starts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol, runtime_checkable

import attrs

from rlsdk.contracts.generation import ActorSpec, Model
from rlsdk.contracts.training import Roles


@attrs.frozen
class MemoryUse:
    """Memory that one process needs for one purpose.

    Attributes:
        role: Purpose, such as `learner weights`.
        bytes: Size.
        on_host: True for host memory of a process that computes on a GPU.
    """

    role: str
    bytes: int
    on_host: bool = False


@attrs.frozen(kw_only=True)
class UpdateShape:
    """One rank's rollouts at their maximum length: those of an optimiser step, or of a batch if nothing is trained.

    Attributes:
        rollouts: Number of rollouts.
        prompt: Tokens of each prompt.
        response: Tokens of each response.
        prompts: Number of distinct prompts among them.
        free: Bytes available to the learner on its device, for options that depend on it; None if unknown.
    """

    rollouts: int
    prompt: int
    response: int
    prompts: int = 1
    free: int | None = None


@runtime_checkable
class EstimatesUpdates(Protocol):
    """Optional interface of a learner that can estimate the memory of its ranks."""

    @property
    def memory_remedies(self) -> Sequence[str]:
        """Options that reduce memory, as `name=value` or in words, cheapest first."""
        ...

    def update_memory(self, roles: Roles, place: ActorSpec, shape: UpdateShape) -> Sequence[MemoryUse]:
        """Estimate the peak memory of a rank, without loading weights; a reference model alone runs forward only.

        Args:
            roles: Models of the learner; only their configs are read.
            place: Number of ranks, and their device.
            shape: Rollouts of an optimiser step.
        """
        ...


@runtime_checkable
class EstimatesGeneration(Protocol):
    """Optional interface of an engine that can estimate its memory."""

    def generation_memory(
        self, model: Model, net: Any, place: ActorSpec, device_bytes: int | None
    ) -> Sequence[MemoryUse]:
        """Estimate the peak memory of an engine, per GPU if it uses any.

        Args:
            model: Model to generate with.
            net: The transformers model, without its weights (on torch's meta device).
            place: Device of the engine.
            device_bytes: Memory of one GPU; None if unknown, or on a CPU.
        """
        ...
