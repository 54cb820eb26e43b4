"""The weight transfer `shared_memory`: learner rank 0 writes buckets to memory that its node's engines share."""

from __future__ import annotations

import mmap
import os
import secrets
import select
import socket
import struct
import sys
from collections.abc import Container, Iterator, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path

import attrs
import numpy as np

from rlsdk.contracts import Weights
from rlsdk.errors import TransferError
from rlsdk.marks import weight_transfer
from rlsdk.plurals import counted
from rlsdk.transfers.buckets import MIB, Header, announced, filled, open_offer, transfer_errors

REGIONS = 32
"""Maximum number of memory regions; three are used in turn, and more while a loader holds tensors."""
_IDLE = 2
"""`sys.getrefcount` of a region without readers: the list and the argument."""
_PLACE = struct.Struct("=5q")
"""Announcement of a bucket: index, begin and size of its region, begin and size of its header in the region."""
_BUSY = struct.Struct("=Q")
"""Answer of an engine that connects, or begins to load a bucket: bit i is set if it reads region i."""
_PEER = struct.Struct("=3i")
"""The kernel's answer to `SO_PEERCRED`: process, user and group."""


@attrs.frozen
class SharedOffer:
    """Socket and memory of one transfer.

    Attributes:
        address: Name of rank 0's socket in Linux's abstract namespace, which leaves no file.
        path: Path under which processes of the node open the memory; it disappears when the learner ends.
        boot: Boot id of the node.
    """

    address: str
    path: str
    boot: str


@weight_transfer("shared_memory")
@attrs.define(kw_only=True, eq=False, slots=False)
class SharedMemory:
    """Share buckets of weights with the engines on the learner's node.

    Rank 0 writes a bucket while engines load the previous one; a socket carries where it is. Engines do not sample
    while they load. All engines must run on the node of the learner's rank 0; otherwise they get the weights from Ray's
    object store, as after any failed transfer.

    When to use: on one machine, if a copy of all weights does not fit in memory next to the model.

    Attributes:
        bucket_mib: Memory shared by learner and engines, in MiB, as three regions used in turn. A larger region is
            added if a layer, or the tensors outside layers, need it.
        timeout: Timeout in seconds for a member that keeps the others waiting.
    """

    bucket_mib: int = 64
    timeout: float = 60.0
    _server: tuple[socket.socket, int] | None = attrs.field(init=False, default=None)
    _engines: dict[int, int] = attrs.field(init=False, factory=dict)
    _file: int = attrs.field(init=False, default=-1)
    _opened: str = attrs.field(init=False, default="")
    _begins: list[int] = attrs.field(init=False, factory=list)
    _regions: list[np.ndarray] = attrs.field(init=False, factory=list)

    @property
    def _size(self) -> int:
        return self.bucket_mib * MIB // 3

    def arriving_bytes(self, largest: int) -> int:
        """Return the bytes of buckets; see `SizesBuckets`."""
        return 2 * self._size + max(self._size, largest)

    def offer(self, parts: Iterator[Weights | None], engines: int, host: str) -> SharedOffer:
        """Open a socket for the engines, and return its name and the path of the memory."""
        if self._file < 0:
            self._file = os.memfd_create("rlsdk-weights")
        if self._server is not None:  # of an offer without a transfer
            self._server[0].close()
        address = f"rlsdk-weights-{secrets.token_hex(16)}"
        for process in [each for each, handle in self._engines.items() if _ready(0, handle)]:  # it has ended
            os.close(self._engines.pop(process))
        server = self._socket()
        server.bind(f"\0{address}")
        server.listen()
        self._server = server, engines
        return SharedOffer(address, f"/proc/{os.getpid()}/fd/{self._file}", _boot())

    def send(self, parts: Iterator[Weights | None]) -> None:
        """Send the weights once to the engines of the last offer; see `StreamsWeights.send`.

        Raises:
            TransferError: An engine did not connect in time, or left.
        """
        (server, count), self._server = open_offer(self._server), None
        with ExitStack() as stack:  # closing a connection notifies its engine
            stack.enter_context(server)
            with transfer_errors(f"{counted(count, 'engine')} and the learner did not meet"):
                engines = [stack.enter_context(self._accepted(server)) for _ in range(count)]
            version = -1
            for weights in filled(parts, self._size):
                header, contents = announced(weights)
                version = header.version
                with transfer_errors(f"weights of version {version} were not sent to all engines"):
                    self._put(engines, header, contents)
            with transfer_errors(f"weights of version {version} were not loaded by all engines"):
                self._put(engines, Header(version), [])
                _answers(engines)  # engines answer the end once they have loaded everything

    def receive(self, offer: SharedOffer, seat: int) -> Iterator[Weights]:
        """Yield the weights bucket by bucket; see `StreamsWeights.receive`.

        Raises:
            TransferError: This engine runs on another node, or the sender left or exceeded the timeout.
        """
        if offer.boot != _boot():
            raise TransferError("this engine is not on the node of the learner's rank 0; use weight_transfer=gloo")
        if offer.path != self._opened:
            self._regions.clear()
            if self._opened:  # another sender's memory
                os.close(self._file)
                self._opened = ""
            try:
                self._file, self._opened = os.open(offer.path, os.O_RDWR), offer.path
            except OSError as error:
                raise TransferError(f"the learner's memory {offer.path} cannot be opened: {error}") from error
        with self._socket() as learner:
            with transfer_errors("the learner cannot be reached"):
                learner.connect(f"\0{offer.address}")
                learner.send(_BUSY.pack(0))
            while True:
                with transfer_errors("the learner announces no more weights"):
                    index, begin, size, head, length = _PLACE.unpack(_message(learner))
                    region = self._region(index, begin, size)
                    header = Header.load(region[head : head + length].tobytes())
                    del region  # otherwise it would count as held
                    held = (i for i in range(len(self._regions)) if sys.getrefcount(self._regions[i]) > _IDLE)
                    learner.send(_BUSY.pack(sum(1 << i for i in {index, *held})))
                if not header.slots:
                    return
                yield header.weights(self._regions[index])

    def _socket(self) -> socket.socket:
        made = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)  # messages arrive whole, and with little delay
        made.settimeout(self.timeout)
        return made

    def _accepted(self, server: socket.socket) -> socket.socket:
        """Accept an engine; other users' processes can see the socket, and are turned away."""
        while True:
            ready = _ready(self.timeout, server.fileno(), *self._engines.values())
            if ready and server.fileno() not in ready:
                raise ConnectionError("the process of an engine has ended")
            if not ready:
                raise TimeoutError("timed out")
            engine, _ = server.accept()
            process, user, _ = _PEER.unpack(engine.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER.size))
            if user == os.getuid():
                if process not in self._engines:
                    with suppress(OSError):  # not visible from this container, or an old kernel
                        self._engines[process] = os.pidfd_open(process)
                engine.settimeout(self.timeout)
                return engine
            engine.close()

    def _put(self, engines: Sequence[socket.socket], header: Header, contents: list[np.ndarray]) -> None:
        """Write a bucket, and its header after it, once engines load the previous one; do not wait for the engines.

        The announcement travels while the next bucket is prepared.
        """
        head = np.frombuffer(header.dump(), np.uint8)
        index = self._unused(header.size + len(head), _answers(engines))
        region = self._regions[index]
        for target, content in zip(header.contents(region), contents, strict=True):
            target[...] = content
        region[header.size : header.size + len(head)] = head
        place = _PLACE.pack(index, self._begins[index], region.nbytes, header.size, len(head))
        for engine in engines:
            engine.send(place)

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
            self._regions.append(self._mapped(begin, size))  # first, since it fails if memory is short
            self._begins.append(begin)
        return index

    def _region(self, index: int, begin: int, size: int) -> np.ndarray:
        """Return a region of the learner's; regions are added one by one, and mapped when they are first used."""
        while len(self._regions) <= index:
            self._regions.append(np.empty(0, np.uint8))
        if self._regions[index].nbytes != size:
            self._regions[index] = self._mapped(begin, size)
        return self._regions[index]

    def _mapped(self, begin: int, size: int) -> np.ndarray:
        return np.frombuffer(mmap.mmap(self._file, size, offset=begin), np.uint8)


def _ready(seconds: float, *descriptors: int) -> set[int]:
    """Wait until one of the descriptors is ready, and return those that are; that of a process is once it has ended."""
    waiting = select.poll()
    for each in descriptors:
        waiting.register(each, select.POLLIN)
    return {each for each, _ in waiting.poll(seconds * 1000)}


def _answers(engines: Sequence[socket.socket]) -> set[int]:
    """Wait until all engines have connected or begun a bucket; return the regions that any of them reads."""
    found = 0
    for engine in engines:
        found |= _BUSY.unpack(_message(engine))[0]
    return {i for i in range(REGIONS) if found >> i & 1}


def _message(other: socket.socket) -> bytes:
    content = other.recv(_PLACE.size)
    if not content:
        raise ConnectionError("the other side left")
    return content


def _boot() -> str:
    return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
