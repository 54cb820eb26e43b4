"""Interfaces of weight transfers, and of learners and engines that send and receive weights in parts."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import attrs

from rlsdk.contracts.generation import Weights

if TYPE_CHECKING:
    import numpy as np


class WeightTransfer(Protocol):
    """Sends weights from learner ranks to engines.

    Each rank and each engine has its own instance, created with the same options. It is a plain object without Ray:
    rlsdk passes the result of `offer` on rank 0 to the engines.
    """

    def offer(self, parts: Iterator[Weights | None], engines: int, host: str) -> Any:
        """Return an offer: what engines need to load the weights. Called on every learner rank before each transfer.

        If the offer is a `Weights`, engines load it directly. Any other offer requires the methods of `StreamsWeights`.

        Args:
            parts: The rank's weights: parts on rank 0, None elsewhere. Iterating over them is a collective call of all
                ranks.
            engines: Number of engines that will receive the weights.
            host: Address of this rank's node.

        Returns:
            The offer (rank 0; None elsewhere).
        """
        ...


@runtime_checkable
class StreamsWeights(Protocol):
    """Optional interface of a weight transfer that streams: engines load parts as they arrive.

    An engine that starts later cannot receive an old offer. If engines are `CopiesEngines`, and the transfer is not
    `SendsFromEachRank`, another engine sends it its weights, by another instance; otherwise the learner sends its
    current ones.
    """

    def send(self, parts: Iterator[Weights | None]) -> None:
        """Send the weights to the engines of the last offer, once; called on every learner rank.

        Args:
            parts: As for `offer`. They are always read to the end, even after a failure, since other ranks take part.

        Raises:
            TransferError: An engine did not connect in time, or disconnected.
        """
        ...

    def receive(self, offer: Any, seat: int) -> Iterator[Weights]:
        """Yield the weights in parts of whole layers; called in an engine.

        The arrays of a part are overwritten once the next part is requested, unless something still references them.

        Args:
            offer: The offer that rank 0 returned.
            seat: Number of this engine among the receivers of the offer, from 1.

        Raises:
            TransferError: The sender or another engine disconnected, or kept the others waiting for too long.
        """
        ...


@runtime_checkable
class StreamsTensors(StreamsWeights, Protocol):
    """Optional interface of a weight transfer that can send torch tensors, from any device.

    `send` takes tensors from a learner that is `GivesWeightTensors`, and arrays from others. `receive` yields tensors,
    or arrays on the CPU.
    """

    @property
    def device(self) -> str:
        """Device to which `receive` writes the weights, by torch's name: `cuda` or `cpu`."""
        ...


@runtime_checkable
class SizesBuckets(StreamsWeights, Protocol):
    """Optional interface of a weight transfer that streams, for the estimate of a run's memory."""

    def arriving_bytes(self, largest: int) -> int:
        """Return the bytes that an engine needs for arriving weights, whose largest part has `largest` bytes."""
        ...


@runtime_checkable
class SendsFromEachRank(StreamsTensors, Protocol):
    """Optional interface of a weight transfer in which each learner rank sends to the engines on its own device.

    `offer` returns an offer on every rank, and `receive` gets all of them, by rank. `send` takes the whole weights on
    every rank, from a learner that is `GivesRankTensors`.
    """

    @property
    def each_rank(self) -> bool:
        """Always true."""
        ...


@runtime_checkable
class GivesWeightParts(Protocol):
    """Optional interface of a learner that can yield its weights without copying all of them at once."""

    def weight_parts(self, version: int) -> Iterator[Weights | None]:
        """Yield the tensors of `weights`, whole layers at a time (rank 0; None elsewhere); a collective call.

        The arrays may share the model's memory: the caller reads them before calling anything else.
        """
        ...


@runtime_checkable
class GivesWeightTensors(Protocol):
    """Optional interface of a learner that can yield its weights without moving them to host memory."""

    def weight_tensors(self, version: int) -> Iterator[Weights | None]:
        """Yield what `GivesWeightParts.weight_parts` yields, as torch tensors on the learner's device."""
        ...


@runtime_checkable
class GivesRankTensors(Protocol):
    """Optional interface of a learner that can yield its weights on every rank."""

    def rank_weight_tensors(self, version: int) -> Iterator[Weights | None]:
        """Yield what `GivesWeightTensors.weight_tensors` yields on rank 0, on every rank."""
        ...


@runtime_checkable
class LoadsWeightParts(Protocol):
    """Optional interface of an engine that can load weights as they arrive; others receive them joined."""

    def load_weight_parts(self, version: int, parts: Iterator[Weights]) -> None:
        """Replace the weights as `load_weights` does, loading each part as it arrives.

        Args:
            version: Version of the weights.
            parts: Parts of whole layers. The arrays of a part may be overwritten once the next part is requested,
                unless something still references them.

        Raises:
            EngineError: A tensor of the model is missing or has a different shape.
            TransferError: The parts ended early. A later load of all weights must still succeed.
        """
        ...


@runtime_checkable
class LoadsWeightTensors(LoadsWeightParts, Protocol):
    """Optional interface of an engine that loads torch tensors, too; others receive numpy arrays."""

    @property
    def loads_tensors(self) -> bool:
        """True if `load_weight_parts` takes torch tensors on the engine's device."""
        ...


@runtime_checkable
class ReceivesWeights(Protocol):
    """Optional interface of an engine that calls its weight transfer itself, such as one of several processes."""

    def receive_weights(self, version: int, transfer: StreamsWeights, offer: Any, seat: int) -> None:
        """Replace the weights by those that `transfer.receive(offer, seat)` yields, wherever the engine calls it.

        Args:
            version: Version of the weights.
            transfer: The engine's instance of the weight transfer; another process may use a copy.
            offer: The offer.
            seat: Number of this engine among the receivers of the offer, from 1.

        Raises:
            EngineError: As `LoadsWeightParts.load_weight_parts`.
            TransferError: As `LoadsWeightParts.load_weight_parts`.
        """
        ...


@runtime_checkable
class CopiesEngines(Protocol):
    """Optional interface of an engine that can copy the weights of another engine, for one that starts later.

    Both have the same component, options and model. The weights are in whatever form the engine holds them, and are
    sent by the run's weight transfer, with the other engine in place of the learner.
    """

    def weight_layout(self) -> str:
        """Return a text that is equal for engines that can copy each other's weights; empty if this one cannot."""
        ...

    def held_weights(self) -> Iterator[Weights]:
        """Return the weights in parts, as torch tensors, which are read in a thread while the engine samples."""
        ...

    def copy_weights(self, version: int, parts: Iterator[Weights]) -> None:
        """Replace the weights by those of another engine of the same layout, arrays or torch tensors.

        Raises:
            TransferError: The parts ended early. A later load of all weights must still succeed.
        """
        ...


@attrs.frozen(eq=False)
class WeightStream:
    """A weight transfer in progress.

    Attributes:
        version: Version of the weights.
        offer: The offer for engines; of a transfer that is `SendsFromEachRank`, those of all ranks.
        finish: Waits until the weights are sent; returns the reason if that failed, else an empty text, and the
            learner's logprobs of the fixed tokens with these weights, float32 `[k - 1]`.
    """

    version: int
    offer: Any
    finish: Callable[[], tuple[str, np.ndarray]]


@runtime_checkable
class StreamsToEngines(Protocol):
    """Optional interface of a group of learner ranks that can stream weights to engines."""

    @property
    def streams(self) -> bool:
        """True if weights are sent by `stream`; False if engines load the object that `weights` returns."""
        ...

    def stream(self, engines: int, token_ids: np.ndarray, version: int | None = None) -> WeightStream:
        """Begin to send the weights to a number of engines, which must receive them meanwhile.

        Args:
            engines: Number of engines.
            token_ids: Fixed tokens, int64 `[k]`.
            version: Version of the weights; defaults to that of the last update.
        """
        ...
