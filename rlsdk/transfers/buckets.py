"""Buckets: parts of the weights that are sent together, each announced by a header before its bytes."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterable, Iterator, Mapping

import attrs
import numpy as np

from rlsdk.contracts import Weights
from rlsdk.weights import joined

MIB = 2**20
ALIGNMENT = 64
"""Alignment in bytes of every tensor in a bucket."""
_IDLE = 3
"""`sys.getrefcount` of an unused buffer: the list, the loop and the argument."""


@attrs.frozen
class Slot:
    """Location of a tensor in a bucket.

    Attributes:
        names: Names of the tensor; tied tensors are sent once.
        dtype: Name of torch's dtype.
        array: Name of the NumPy dtype in which the tensor is sent.
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

    def arrays(self, buffer: np.ndarray) -> Iterator[tuple[Slot, np.ndarray]]:
        """Yield each slot with its bytes, uint8 `[slot.size]`, in a buffer."""
        for slot in self.slots:
            yield slot, buffer[slot.begin : slot.begin + slot.size]

    def weights(self, buffer: np.ndarray) -> Weights:
        """Return the weights in a buffer, uint8 `[at least self.size]`, as views."""
        tensors: dict[str, np.ndarray] = {}
        dtypes: dict[str, str] = {}
        for slot, content in self.arrays(buffer):
            array = content.view(slot.array).reshape(slot.shape)
            tensors |= dict.fromkeys(slot.names, array)
            dtypes |= dict.fromkeys(slot.names, slot.dtype)
        return Weights(self.version, tensors, dtypes)


def announced(weights: Weights) -> tuple[Header, list[np.ndarray]]:
    """Lay out a bucket.

    Returns:
        Its header, and the bytes of each slot, uint8 `[slot.size]`, without copying contiguous arrays.
    """
    names: dict[int, list[str]] = {}
    for name, array in weights.tensors.items():
        names.setdefault(id(array), []).append(name)
    slots, contents, begin = [], [], 0
    for group in names.values():
        array = np.ascontiguousarray(weights.tensors[group[0]])
        shape = weights.tensors[group[0]].shape  # `ascontiguousarray` turns a scalar into a vector
        slots.append(Slot(tuple(group), weights.dtypes[group[0]], array.dtype.name, shape, begin))
        contents.append(array.reshape(-1).view(np.uint8))
        begin += -(-array.nbytes // ALIGNMENT) * ALIGNMENT
    return Header(weights.version, tuple(slots)), contents


def filled(parts: Iterable[Weights | None], size: int) -> Iterator[Weights]:
    """Join successive parts into buckets of at most `size` bytes; a larger part gets its own bucket."""
    waiting: list[Weights] = []
    held = 0
    for part in parts:
        if part is None:
            continue
        more = sum(_padded(part.tensors))
        if waiting and held + more > size:
            yield _together(waiting)
            waiting, held = [], 0
        waiting.append(part)
        held += more
        del part  # the learner may free what it gathered
    if waiting:
        yield _together(waiting)


def _padded(tensors: Mapping[str, np.ndarray]) -> Iterator[int]:
    return (-(-array.nbytes // ALIGNMENT) * ALIGNMENT for array in {id(a): a for a in tensors.values()}.values())


def _together(parts: list[Weights]) -> Weights:
    found = joined(parts)
    assert found is not None
    return found


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
