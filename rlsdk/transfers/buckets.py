"""Buckets: parts of the weights that are sent together, each announced by a header before its bytes."""

from __future__ import annotations

import json
import math
import re
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeVar

import attrs
import numpy as np

from rlsdk.contracts import Weights
from rlsdk.errors import TransferError, first_line
from rlsdk.weights import as_bytes, joined

if TYPE_CHECKING:
    import torch

    Buffer = TypeVar("Buffer", np.ndarray, torch.Tensor)

Offer = TypeVar("Offer")
MIB = 2**20
ALIGNMENT = 64
"""Alignment in bytes of every tensor in a bucket."""
ARRAYS = {"bfloat16": "uint16"}
"""NumPy dtypes of arrays whose torch dtype has another name; see `rlsdk.weights`."""
_IDLE = 3
"""`sys.getrefcount` of an unused buffer: the list, the loop and the argument."""


def open_offer(offer: Offer | None) -> Offer:
    """Return the offer that a transfer's `send` is about to use.

    Raises:
        TransferError: There is none: `offer` was not called before, or `send` was called twice.
    """
    if offer is None:
        raise TransferError("call send() once after each offer(); there is no open offer")
    return offer


@attrs.frozen
class Slot:
    """Location of a tensor in a bucket.

    Attributes:
        names: Names of the tensor; tied tensors are sent once.
        dtype: Name of torch's dtype.
        array: Name of the NumPy dtype of the tensor's array.
        shape: Shape of the tensor.
        begin: Offset of its first byte.
    """

    names: tuple[str, ...]
    dtype: str
    array: str
    shape: tuple[int, ...]
    begin: int

    @property
    def size(self) -> int:
        """Number of bytes."""
        return math.prod(self.shape) * np.dtype(self.array).itemsize


@attrs.frozen
class Header:
    """Announcement of a bucket; one without slots ends the transfer.

    Attributes:
        version: Version of the weights.
        slots: Tensors of the bucket, in the order of their bytes.
    """

    version: int
    slots: tuple[Slot, ...] = ()

    @property
    def size(self) -> int:
        """Number of bytes of the bucket."""
        return self.slots[-1].begin + self.slots[-1].size if self.slots else 0

    def dump(self) -> bytes:
        """Return the header as bytes."""
        return json.dumps([self.version, [attrs.astuple(slot) for slot in self.slots]]).encode()

    @classmethod
    def load(cls, content: bytes) -> Header:
        """Read what `dump` wrote."""
        version, rows = json.loads(content)
        return cls(version, tuple(Slot(tuple(n), dtype, array, tuple(s), at) for n, dtype, array, s, at in rows))

    def contents(self, buffer: Buffer) -> list[Buffer]:
        """Return the bytes of each slot, uint8 `[slot.size]`, as views of a buffer."""
        return [buffer[slot.begin : slot.begin + slot.size] for slot in self.slots]

    def weights(self, buffer: np.ndarray | torch.Tensor) -> Weights:
        """Return the weights in a buffer, uint8 `[at least self.size]`, as views of its type (arrays or tensors)."""
        tensors: dict[str, np.ndarray | torch.Tensor] = {}
        dtypes: dict[str, str] = {}
        for slot in self.slots:
            content: Any = buffer[slot.begin : slot.begin + slot.size]
            dtype = slot.array if isinstance(buffer, np.ndarray) else _torch_dtype(slot.dtype)
            tensors |= dict.fromkeys(slot.names, content.view(dtype).reshape(slot.shape))
            dtypes |= dict.fromkeys(slot.names, slot.dtype)
        return Weights(self.version, tensors, dtypes)


def _torch_dtype(name: str) -> torch.dtype:
    import torch

    found: torch.dtype = getattr(torch, name)
    return found


def announced(weights: Weights) -> tuple[Header, list[Any]]:
    """Lay out a bucket.

    Returns:
        Its header, and the bytes of each slot, uint8 `[slot.size]`: arrays or tensors, like the weights. Contiguous
        ones are not copied.
    """
    names: dict[int, list[str]] = {}
    for name, array in weights.tensors.items():
        names.setdefault(id(array), []).append(name)
    slots, contents, begin = [], [], 0
    for group in names.values():
        values, dtype = weights.tensors[group[0]], weights.dtypes[group[0]]
        carried = values.dtype.name if isinstance(values, np.ndarray) else ARRAYS.get(dtype, dtype)
        slots.append(Slot(tuple(group), dtype, carried, tuple(values.shape), begin))
        contents.append(as_bytes(values))
        begin += -(-values.nbytes // ALIGNMENT) * ALIGNMENT
    return Header(weights.version, tuple(slots)), contents


def filled(parts: Iterable[Weights | None], size: int) -> Iterator[Weights]:
    """Join successive parts into buckets of at most `size` bytes; a larger part gets its own bucket."""
    waiting: list[Weights] = []
    held = 0
    for part in parts:
        if part is None:
            continue
        arrays = {id(array): array for array in part.tensors.values()}.values()
        more = sum(-(-array.nbytes // ALIGNMENT) * ALIGNMENT for array in arrays)
        if waiting and held + more > size:
            yield _together(waiting)
            waiting, held = [], 0
        waiting.append(part)
        held += more
        del part  # the learner may free what it gathered
    if waiting:
        yield _together(waiting)


def _together(parts: list[Weights]) -> Weights:
    found = joined(parts)
    assert found is not None
    return found


@contextmanager
def transfer_errors(what: str) -> Iterator[None]:
    """Convert exceptions of torch.distributed, CUDA and sockets to `TransferError`."""
    try:
        yield
    except (RuntimeError, OSError, EOFError) as error:
        # Strip gloo's source line and its advice, and the stack that torch adds.
        text = re.sub(r"^\[\S+\] ", "", first_line(error)).split(" This is typically")[0]
        # From Python 3.12 on, exceptions that leave context managers like this one form cycles with their frames, in
        # which the connections would stay open until garbage is collected.
        raise TransferError(f"{what}: {text}") from error.with_traceback(None)


class Buffers:
    """Receive buffers for buckets, reused once nothing refers to their contents.

    A loader such as vLLM's may keep tensors of an incomplete layer; these are not overwritten.
    """

    def __init__(self, size: int) -> None:
        """Create a set without buffers.

        Args:
            size: Bytes of a buffer; larger only for a bucket that needs it.
        """
        self.size = size
        self.held: list[np.ndarray] = []

    def take(self, count: int) -> np.ndarray:
        """Return an unused buffer, uint8 `[at least count]`."""
        busy = []
        for buffer in self.held:
            if sys.getrefcount(buffer) > _IDLE:
                busy.append(buffer)
            elif buffer.nbytes >= count:
                return buffer
        # Idle buffers that are too small are freed and replaced by a new one.
        self.held = [*busy, np.empty(max(count, self.size), np.uint8)]
        return self.held[-1]
