"""Interfaces of weight transfers, and of learners and engines that give and take weights part by part."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import attrs

from rlsdk.contracts.generation import Weights

if TYPE_CHECKING:
    import numpy as np


class WeightTransfer(Protocol):
    """Carries weights from the ranks of the learner to the engines.

    Each rank and each engine has an instance of its own, made from the same options. A plain object without Ray: rlsdk
    carries what `offer` returns from rank 0 to the engines.
    """

    def offer(self, parts: Iterator[Weights | None], engines: int, host: str) -> Any:
        """Return what engines need to load the weights; called on every rank of the learner before each transfer.

        Engines load an offer that is a `Weights` as it is. Any other needs the methods of `StreamsWeights`.

        Args:
            parts: Weights of the rank: parts on rank 0, None elsewhere. Reading them is a collective call of all ranks.
            engines: Number of engines that will receive them.
            host: Address of this rank's node.

        Returns:
            The offer (rank 0; None elsewhere).
        """
        ...


@runtime_checkable
class StreamsWeights(Protocol):
    """Optional interface of a weight transfer that never holds all weights at once: engines load them as they come.

    An engine that starts later cannot receive an old offer; the learner sends it its weights of then.
    """

    def send(self, parts: Iterator[Weights | None]) -> None:
        """Send the weights to the engines of the last offer, once; called on every rank of the learner.

        Args:
            parts: As for `offer`. They are read to the end whatever happens, since other ranks take part in it.

        Raises:
            TransferError: An engine did not come in time, or left.
        """
        ...

    def receive(self, offer: Any, seat: int) -> Iterator[Weights]:
        """Yield the weights part by part, each with whole layers; called in an engine.

        The arrays of a part are overwritten after the next one was asked for, unless something still refers to them.

        Args:
            offer: What rank 0 returned.
            seat: Number of this engine among those of the offer, from 1.

        Raises:
            TransferError: The sender or another engine left, or kept the others waiting for too long.
        """
        ...


@runtime_checkable
class GivesWeightParts(Protocol):
    """Optional interface of a learner that can give its weights without holding a copy of all of them."""

    def weight_parts(self, version: int) -> Iterator[Weights | None]:
        """The tensors of `weights`, whole layers at a time (rank 0; None elsewhere); a collective call of all ranks.

        Their arrays may be the model's own memory: they are read before anything else is called.
        """
        ...


@runtime_checkable
class LoadsWeightParts(Protocol):
    """Optional interface of an engine that can load weights as they come; others get them joined."""

    def load_weight_parts(self, version: int, parts: Iterator[Weights]) -> None:
        """Replace the weights as `load_weights` does, each part as it comes.

        Args:
            version: Version of the weights.
            parts: Parts of whole layers. The arrays of a part may be overwritten after the next one was asked for,
                unless something still refers to them.

        Raises:
            EngineError: A tensor of the model is missing or has another shape.
            TransferError: The parts ended too early. A later load of all weights must then succeed.
        """
        ...


@attrs.frozen(eq=False)
class WeightStream:
    """A transfer that has begun.

    Attributes:
        version: Version of the weights.
        offer: What engines receive; an `ObjectRef` on a Ray cluster.
        finish: Waits until the weights are sent; returns why they were not, empty if they were, and the learner's
            logprobs of the fixed tokens under them, float32 `[k - 1]`.
    """

    version: int
    offer: Any
    finish: Callable[[], tuple[str, np.ndarray]]


@runtime_checkable
class StreamsToEngines(Protocol):
    """Optional interface of all ranks of a learner, for engines that receive weights as they are sent."""

    @property
    def streams(self) -> bool:
        """True if weights are sent by `stream`; False if engines load the object that `weights` returns."""
        ...

    def stream(self, engines: int, token_ids: np.ndarray, version: int | None = None) -> WeightStream:
        """Begin to send the weights to so many engines, which must receive them meanwhile.

        Args:
            engines: Number of engines.
            token_ids: Fixed tokens, int64 `[k]`.
            version: Version of the weights; left out, that of the last update.
        """
        ...
