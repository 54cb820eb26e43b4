"""The weight transfer `shared_memory`: learner rank 0 writes buckets to memory that its node's engines share."""

from __future__ import annotations

import mmap
import os
import sys
from collections.abc import Callable, Container, Iterator
from pathlib import Path
from typing import Any

import attrs
import numpy as np

from rlsdk.contracts import Weights
from rlsdk.errors import TransferError
from rlsdk.marks import weight_transfer
from rlsdk.transfers.buckets import Header
from rlsdk.transfers.gloo import MIB, Gloo, Meeting, broadcast, naming
from rlsdk.weights import unpack

REGIONS = 32
"""Maximum number of memory regions; three are used in turn, and more while a loader holds tensors."""
_IDLE = 2
"""`sys.getrefcount` of a region without readers: the list and the argument."""


@attrs.frozen
class SharedMeeting(Meeting):
    """Rendezvous of the members of one transfer, with the memory that they share.

    Attributes:
        path: Path under which processes of the node open the memory; it disappears when the learner ends.
        boot: Boot id of the node.
    """

    path: str
    boot: str


@weight_transfer("shared_memory")
@attrs.define(kw_only=True, eq=False, slots=False)
class SharedMemory(Gloo):
    """Share buckets of weights with the engines on the learner's node; otherwise like `gloo`.

    Rank 0 writes a bucket while engines load the previous one. Only headers and the state of memory regions go over
    gloo. All engines must run on the node of the learner's rank 0; otherwise they get the weights from Ray's object
    store, as after any failed transfer.

    When to use: on one machine, if a copy of all weights does not fit in memory next to the model.

    Attributes:
        bucket_mib: Memory shared by learner and engines, in MiB, as three regions used in turn. A larger region is
            added if a layer, or the tensors outside layers, need it.
        timeout: Timeout in seconds for a member that keeps the others waiting.
    """

    _file: int = attrs.field(init=False, default=-1)
    _opened: str = attrs.field(init=False, default="")
    _begins: list[int] = attrs.field(init=False, factory=list)
    _regions: list[np.ndarray] = attrs.field(init=False, factory=list)
    _busy: Callable[[], set[int]] | None = attrs.field(init=False, default=None)
    _place: int = attrs.field(init=False, default=0)

    @property
    def _size(self) -> int:
        return self.bucket_mib * MIB // 3

    def offer(self, parts: Iterator[Weights | None], engines: int, host: str) -> SharedMeeting:
        """Open a store through which engines find this rank, and return its address and the path of the memory."""
        if self._file < 0:
            self._file = os.memfd_create("rlsdk-weights")
        self._busy = None
        found = super().offer(parts, engines, host)
        path = f"/proc/{os.getpid()}/fd/{self._file}"
        return SharedMeeting(found.host, found.port, found.members, path, _boot())

    def receive(self, offer: Meeting, seat: int) -> Iterator[Weights]:
        """Yield the weights bucket by bucket; see `StreamsWeights.receive`.

        Raises:
            TransferError: This engine runs on another node, or the sender or another engine left or exceeded the
                timeout.
        """
        assert isinstance(offer, SharedMeeting)
        if offer.boot != _boot():
            raise TransferError("this engine is not on the node of the learner's rank 0; use weight_transfer=gloo")
        if offer.path != self._opened:
            self._regions.clear()
            try:
                self._file, self._opened = os.open(offer.path, os.O_RDWR), offer.path
            except OSError as error:
                raise TransferError(f"the learner's memory {offer.path} cannot be opened: {error}") from error
        yield from super().receive(offer, seat)

    def _put(self, group: Any, header: Header, contents: list[np.ndarray]) -> None:
        """Write a bucket into an unused region once engines load the previous one; announce it without waiting.

        Its header follows it in the region. A message takes as long as copying several MiB, so one has to do, and it
        travels while the learner prepares the next bucket.
        """
        busy = self._busy() if self._busy is not None else set()
        head = np.frombuffer(header.dump(), np.uint8)
        index = self._unused(header.size + len(head), busy)
        region = self._regions[index]
        for (_, target), content in zip(header.arrays(region), contents, strict=True):
            target[...] = content
        region[header.size : header.size + len(head)] = head
        place = np.array([index, self._begins[index], region.nbytes, header.size, len(head)])
        sent = group.broadcast(unpack(place, "int64"), 0)
        self._busy = _shared_busy(group, [index], after=sent)
        if not header.slots:
            self._busy()

    def _unused(self, size: int, busy: Container[int]) -> int:
        """Return the index of a region of at least `size` bytes that is not busy, added if there is none."""
        fitting = (i for i, region in enumerate(self._regions) if i not in busy and region.nbytes >= size)
        index = next(fitting, len(self._regions))
        if index == REGIONS:
            raise TransferError(f"engines hold tensors in all of {REGIONS} regions; use weight_transfer=gloo")
        if index == len(self._regions):
            begin = self._begins[-1] + self._regions[-1].nbytes if index else 0
            size = -(-max(size, self._size) // mmap.PAGESIZE) * mmap.PAGESIZE
            os.ftruncate(self._file, begin + size)
            self._begins.append(begin)
            self._regions.append(self._mapped(begin, size))
        return index

    def _header(self, group: Any) -> Header:
        with naming("the learner announces no more weights"):
            place = np.zeros(5, np.int64)
            broadcast(group, [place.view(np.uint8)])
            self._place, begin, size, head, length = place.tolist()
            # Regions are added one by one; a later engine maps earlier regions when they are reused.
            while len(self._regions) <= self._place:
                self._regions.append(np.empty(0, np.uint8))
            if self._regions[self._place].nbytes != size:
                self._regions[self._place] = self._mapped(begin, size)
            held = (i for i in range(len(self._regions)) if sys.getrefcount(self._regions[i]) > _IDLE)
            _shared_busy(group, [self._place, *held])()
        return Header.load(self._regions[self._place][head : head + length].tobytes())

    def _received(self, group: Any, header: Header) -> Weights:
        return header.weights(self._regions[self._place])

    def _mapped(self, begin: int, size: int) -> np.ndarray:
        return np.frombuffer(mmap.mmap(self._file, size, offset=begin), np.uint8)


def _shared_busy(group: Any, mine: list[int], *, after: Any = None) -> Callable[[], set[int]]:
    """Share which regions this member reads or has written.

    Args:
        group: Process group of the transfer.
        mine: Indices of the regions.
        after: Earlier message that must have been sent, too.

    Returns:
        Function that waits for all members, and returns the indices of regions that any of them uses.
    """
    import torch
    from torch.distributed import ReduceOp

    flags = torch.zeros(REGIONS, dtype=torch.int64)
    flags[mine] = 1
    shared = group.allreduce(flags, ReduceOp.MAX)

    def busy() -> set[int]:
        if after is not None:
            after.wait()
        shared.wait()
        return set(flags.nonzero().flatten().tolist())

    return busy


def _boot() -> str:
    return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
