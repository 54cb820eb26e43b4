"""Optional interfaces of components: timing, state, requirements, limitations, and estimates of memory."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, Literal, Protocol, runtime_checkable

import attrs

from rlsdk.components import naming, see_definition, title_of
from rlsdk.contracts.generation import ActorSpec, DType, Model
from rlsdk.contracts.training import Roles
from rlsdk.errors import RunError


@runtime_checkable
class HasClock(Protocol):
    """Optional interface of a learner that times its work."""

    def clock(self) -> dict[str, float]:
        """Return accumulated seconds by name, each ending in `_seconds`; they never decrease.

        For `time/update_mfu`, a learner also returns `update_flop`, the FLOPs that its models have needed for this
        rank's share of the updates, and `peak_tflops`, the peak of its device in TFLOP/s, if it knows it.
        """
        ...


class HasMemory(Protocol):
    """Optional interface of a component that keeps state between calls; checkpoints save it.

    Shapings, advantages, policy losses, corrections, rewards and samplers may have state.
    """

    def state(self) -> Any:
        """Return the state, as plain JSON."""
        ...

    def restore(self, state: Any) -> None:
        """Replace the state by one that `state()` returned."""
        ...


def memory_of(component: Any) -> HasMemory | None:
    """Return a component as `HasMemory`; None if it keeps no state.

    Args:
        component: Component, ready to run. One with scheduled options delegates to its current instance, which
            `isinstance` does not see in every version of Python.
    """
    has: bool = callable(getattr(component, "state", None)) and callable(getattr(component, "restore", None))
    return component if has else None


def state_of(component: Any) -> Any:
    """Return a copy of a component's state, as a checkpoint gives it back; None if it keeps no state.

    Raises:
        RunError: JSON cannot hold the state; the message names the entry and the component.
    """
    memory = memory_of(component)
    if memory is None:
        return None
    with naming(component):
        state = memory.state()
    try:
        return json.loads(json.dumps(state))
    except (TypeError, ValueError) as error:
        raise RunError(
            f"the state() of {title_of(component)} cannot be saved: {_refused_path(state)}{error}; expected plain JSON "
            f"(numbers, text, lists, mappings with text as keys), such as tensor.tolist(){see_definition(component)}"
        ) from error


def restore_state(component: Any, state: Any) -> None:
    """Give a component that keeps state one that `state_of` has returned.

    Raises:
        RunError: It cannot use it, such as one of another version of itself.
    """
    with naming(component):
        component.restore(state)


def _refused_path(state: Any) -> str:
    """Return the path to the entry that JSON cannot hold, such as `['means'][0]: `; empty for the whole state."""
    entries = state.items() if isinstance(state, dict) else enumerate(state) if isinstance(state, list | tuple) else ()
    for key, entry in entries:
        try:
            json.dumps(entry)
        except TypeError:
            return f"[{key!r}]{_refused_path(entry) or ': '}"
        except ValueError:  # it contains itself
            return ""
    return ""


@runtime_checkable
class FreesDevice(Protocol):
    """Optional interface of a learner that gives memory of its GPU to the engines that share it."""

    def sleep(self) -> None:
        """Free memory that generation does not need; the next call that needs it takes it back.

        Weights, canary and checkpoints stay available. At a sync, it is called before engines wake, and again once they
        have the weights.
        """
        ...


@runtime_checkable
class MovesReference(Protocol):
    """Optional interface of a learner whose reference model can follow the policy.

    If `Roles.reference_mix` says that it will, `save` and `load` include the reference model.
    """

    def reference_faults(self) -> Sequence[str]:
        """Return the given options that prevent it: one sentence each, with its remedy."""
        ...

    def move_reference(self) -> None:
        """Replace the reference model by `mix · policy + (1 - mix) · reference` on every rank; see `Roles`."""
        ...


@runtime_checkable
class AdaptsEntropy(Protocol):
    """Optional interface of a learner that can hold an entropy: `LossSpec.entropy_coef` may be an `EntropyTarget`."""

    @property
    def adapts_entropy(self) -> bool:
        """True if it measures the entropy in each optimiser step, and adapts the weight of the bonus to it."""
        ...


@runtime_checkable
class SizesCheckpoints(Protocol):
    """Optional interface of a learner that can estimate the size of its checkpoints.

    For other learners, 16 bytes per parameter are assumed.
    """

    def checkpoint_bytes(self, model: Any, dtype: DType, *, critic: bool) -> int:
        """Estimate the bytes that `save` writes for one role.

        Args:
            model: The transformers model, without its weights (on torch's meta device).
            dtype: Compute dtype of the weights.
            critic: True for the critic, False for the actor.
        """
        ...


@runtime_checkable
class LimitsMicroBatches(Protocol):
    """Optional interface of a learner that splits its share of an optimiser step into micro-batches."""

    @property
    def micro_batch_tokens(self) -> int | Literal["auto"]:
        """Maximum tokens of one forward pass; `auto` if the learner chooses it when it starts."""
        ...


@runtime_checkable
class OnlySamples(Protocol):
    """Optional interface of an engine for evaluation and debugging, whose samples cannot be trained on."""

    def training_faults(self) -> Sequence[str]:
        """Return the reasons why they cannot: one sentence each, with its remedy."""
        ...


@runtime_checkable
class ExaminesModel(Protocol):
    """Optional interface of an engine or learner that can tell before it starts whether it can run a model."""

    def model_faults(self, model: Any) -> Sequence[str]:
        """Return the reasons why a model cannot run with the given options: one sentence each, with its remedy.

        Args:
            model: The transformers model, without its weights (on torch's meta device).
        """
        ...


@runtime_checkable
class ComputesExactly(Protocol):
    """Optional interface of an engine or learner that supports `model.exact`: logprobs computed by `rlsdk.exact`."""

    def exact_faults(self) -> Sequence[str]:
        """Return the given options that prevent it: one sentence each, with its remedy."""
        ...


@runtime_checkable
class ReplaysRouting(Protocol):
    """Optional interface of a learner whose actor uses the experts in `batch.context["routed_experts"]`.

    They are int16 `[T, layers, k]`; -1 leaves the choice to the learner's own router.
    """

    def routing_faults(self, model: Any) -> Sequence[str]:
        """Return the reasons why a model's experts cannot be replayed with the given options; empty if they can.

        Args:
            model: The transformers model, without its weights (on torch's meta device).
        """
        ...


@runtime_checkable
class Requires(Protocol):
    """Optional interface of an engine, learner or tracker that needs further Python distributions."""

    @property
    def requires(self) -> tuple[str, ...]:
        """Distributions needed with the given options; rlsdk checks for them before the run starts."""
        ...


@runtime_checkable
class Preloads(Protocol):
    """Optional interface of an engine or learner that can import its modules before it is started.

    On a CPU this happens once, while the run is still being checked, in a process that is then forked for each actor.
    """

    def preload(self) -> None:
        """Import modules; load nothing, start no thread, draw no random number."""
        ...


@runtime_checkable
class RequiresPrograms(Protocol):
    """Optional interface of an engine or learner that, with some options, runs programs that may not be installed."""

    @property
    def programs(self) -> tuple[str, ...]:
        """Names or paths of the programs needed with the given options; rlsdk checks for them before the run starts."""
        ...


Turn = Literal["", "generate", "sample", "sync", "learn"]


@attrs.frozen
class MemoryUse:
    """Memory that one process needs for one purpose.

    Attributes:
        role: Purpose, such as `learner weights`.
        bytes: Size.
        on_host: True for host memory of a process that computes on a GPU.
        turn: If engines and learner share a GPU, the phase in which the memory is needed; empty if it always is.
            Engines are awake in `generate`, which consists of `sync` (weights are sent) and `sample` (after that).
    """

    role: str
    bytes: int
    on_host: bool = False
    turn: Turn = ""


@attrs.frozen(kw_only=True)
class UpdateShape:
    """One rank's rollouts at their maximum length: those of an optimiser step, or of a batch if nothing is trained.

    Attributes:
        rollouts: Number of rollouts.
        prompt: Tokens of each prompt.
        response: Tokens of each response.
        prompts: Number of distinct prompts among them.
        together: Number of rollouts that must be in one micro-batch, since the loss compares them.
        free: Bytes available to the learner on its device, for options that depend on it; None if unknown.
    """

    rollouts: int
    prompt: int
    response: int
    prompts: int = 1
    together: int = 1
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
