"""Copy weights from one engine to another in the form in which both hold them, without the learner."""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cached_property
from typing import TYPE_CHECKING, Any

from rlsdk.contracts import StreamsTensors, Weights
from rlsdk.errors import TransferError, first_line
from rlsdk.plugins import ComponentRef, Plugins
from rlsdk.weights import from_weights, on_host, to_weights

if TYPE_CHECKING:
    from torch import Tensor


def layout_of(tensors: Mapping[str, Tensor]) -> str:
    """Return a digest of the names, dtypes and shapes of tensors; empty if there are none."""
    rows = [(name, str(tensor.dtype), list(tensor.shape)) for name, tensor in sorted(tensors.items())]
    return hashlib.sha256(json.dumps(rows).encode()).hexdigest() if rows else ""


def held_parts(version: int, tensors: Mapping[str, Tensor]) -> Iterator[Weights]:
    """Yield each tensor as a part of the weights, without a copy; names that share a tensor share a part."""
    names: dict[tuple[int, int], list[str]] = {}
    for name, tensor in tensors.items():
        names.setdefault((tensor.data_ptr(), tensor.nbytes), []).append(name)
    for group in names.values():
        yield to_weights(version, {name: tensors[name] for name in group}, copy=False, host=False)


def copy_parts(tensors: Mapping[str, Tensor], parts: Iterator[Weights]) -> None:
    """Overwrite tensors with the parts that `held_parts` yields for tensors of the same layout."""
    import torch

    with torch.inference_mode():
        for part in parts:
            for name, tensor in from_weights(part):
                tensors[name].copy_(tensor)


class CopySender:
    """Send an engine's weights to another engine, by an instance of the run's weight transfer that only sends."""

    def __init__(self, engine: Any, transfer: ComponentRef | None) -> None:
        """Create a sender.

        Args:
            engine: The engine, a `CopiesEngines` if it sends anything.
            transfer: Reference to the weight transfer, a `StreamsWeights` if it sends anything.
        """
        self._engine, self._reference = engine, transfer

    @cached_property
    def _transfer(self) -> Any:
        assert self._reference is not None
        return Plugins().resolve(self._reference)

    def offer(self) -> Any:
        """Return an offer of the weights for another engine; `send` sends them.

        Raises:
            TransferError: The weight transfer makes no offer in an engine.
        """
        import ray

        transfer = self._transfer
        with _transfer_errors():
            return transfer.offer(self._held(), 1, str(ray.util.get_node_ip_address()))

    async def send(self) -> None:
        """Send the weights in a thread, while the engine continues to sample.

        Raises:
            TransferError: The other engine left, or the weight transfer cannot send from an engine.
        """
        with _transfer_errors():
            await asyncio.to_thread(self._transfer.send, self._held())

    def _held(self) -> Iterator[Weights]:
        parts = self._engine.held_weights()
        return parts if isinstance(self._transfer, StreamsTensors) else map(on_host, parts)


@contextmanager
def _transfer_errors() -> Iterator[None]:
    """Convert all exceptions to `TransferError`: a plugin's transfer may not work outside of a learner."""
    try:
        yield
    except TransferError:
        raise
    except Exception as error:
        raise TransferError(f"weights were not sent to another engine: {first_line(error)}") from error
