"""Optional interfaces of engines, learners and other components: a clock, a memory, and what they require or refuse."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, Protocol, runtime_checkable

from rlsdk.contracts.generation import DType


@runtime_checkable
class HasClock(Protocol):
    """Optional interface of a learner that times its work."""

    def clock(self) -> dict[str, float]:
        """Return seconds so far by name; they only grow."""
        ...


class HasMemory(Protocol):
    """Optional interface of a component that remembers something between calls; checkpoints keep it.

    Shapings, advantages, policy losses, corrections and rewards may have a memory.
    """

    def state(self) -> Any:
        """Return what it remembers, as plain JSON."""
        ...

    def restore(self, state: Any) -> None:
        """Replace what it remembers by what `state()` returned."""
        ...


def memory_of(component: Any) -> HasMemory | None:
    """Return a component as its memory; None if it has none.

    Args:
        component: Ready to run. One with scheduled options passes on the methods that it has at the time, which
            `isinstance` does not see in every version of Python.
    """
    has: bool = callable(getattr(component, "state", None)) and callable(getattr(component, "restore", None))
    return component if has else None


@runtime_checkable
class SizesCheckpoints(Protocol):
    """Optional interface of a learner that knows the size of its checkpoints.

    For other learners, 16 bytes per parameter are assumed.
    """

    def checkpoint_bytes(self, model: Any, dtype: DType, *, critic: bool) -> int:
        """Estimate the bytes that `save` writes for one role.

        Args:
            model: The transformers model, without its weights (on torch's meta device).
            dtype: Dtype that the weights are computed in.
            critic: True for the critic, False for the actor.
        """
        ...


@runtime_checkable
class LimitsMicroBatches(Protocol):
    """A learner that divides its share of an optimiser step into forward passes of a limited size."""

    @property
    def micro_batch_tokens(self) -> int | Literal["auto"]:
        """Greatest number of tokens of one forward pass; `auto` if the learner chooses it when it starts."""
        ...


@runtime_checkable
class OnlySamples(Protocol):
    """Optional interface of an engine for evaluation and debugging, on whose samples nothing can be trained."""

    def training_faults(self) -> Sequence[str]:
        """Say why not: one sentence per reason, with its remedy."""
        ...


@runtime_checkable
class ExaminesModel(Protocol):
    """Optional interface of an engine or learner that knows before it starts whether it can run a model."""

    def model_faults(self, model: Any) -> Sequence[str]:
        """Say why a model cannot be run with the given options: one sentence per reason, with its remedy.

        Args:
            model: The transformers model, without its weights (on torch's meta device).
        """
        ...


@runtime_checkable
class ComputesExactly(Protocol):
    """Optional interface of an engine or learner that computes logprobs as `rlsdk.exact` does if the model says so."""

    def exact_faults(self) -> Sequence[str]:
        """Say which of the given options stand in the way: one sentence per reason, with its remedy."""
        ...


@runtime_checkable
class ReplaysRouting(Protocol):
    """Optional interface of a learner whose actor chooses the experts in `batch.context["routed_experts"]`.

    They are int16 `[T, layers, k]`, -1 where the learner's own router chooses.
    """

    def routing_faults(self, model: Any) -> Sequence[str]:
        """Say why the experts of a model cannot be replayed with the options given; none if they can.

        Args:
            model: The transformers model, without its weights (on torch's meta device).
        """
        ...


@runtime_checkable
class Requires(Protocol):
    """Optional interface of an engine, learner or tracker that needs further distributions."""

    @property
    def requires(self) -> tuple[str, ...]:
        """Distributions needed with the given options; looked up before anything starts."""
        ...


@runtime_checkable
class Preloads(Protocol):
    """Optional interface of an engine or learner that can import what it needs before it is started.

    On a CPU this is done once, in a process that is then forked for each actor, while the run is still being checked.
    """

    def preload(self) -> None:
        """Import modules; nothing is loaded, no thread is started, and no random number is drawn."""
        ...


@runtime_checkable
class RequiresPrograms(Protocol):
    """Optional interface of an engine or learner that, with some options, starts programs a machine may lack."""

    @property
    def programs(self) -> tuple[str, ...]:
        """Names or paths of the programs needed with the given options; looked up before anything starts."""
        ...
