"""The weight transfer `gloo`: rank 0 of the learner broadcasts buckets to all engines, over TCP."""

from __future__ import annotations

import re
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import attrs
import numpy as np

from rlsdk.contracts import Weights
from rlsdk.errors import TransferError
from rlsdk.marks import weight_transfer
from rlsdk.transfers.buckets import MIB, Buffers, Header, announced, filled
from rlsdk.weights import unpack


@attrs.frozen
class Meeting:
    """Rendezvous of the members of one transfer.

    Attributes:
        host: Address of rank 0's node.
        port: Port of its store.
        members: Number of engines plus one.
    """

    host: str
    port: int
    members: int


@weight_transfer("gloo")
@attrs.define(kw_only=True, eq=False, slots=False)
class Gloo:
    """Broadcast weights to all engines at once, bucket by bucket, in a separate process group.

    The group lives for one transfer, so engines may join and leave in between. Engines do not sample while they load.
    Engines that a failed transfer leaves with mixed versions load all weights from Ray's object store.

    When to use: on several machines without GPUs, if a copy of all weights does not fit in memory next to the model. On
    one machine, `shared_memory` is faster, since sockets copy data more often.

    Attributes:
        bucket_mib: Receive memory of each engine, in MiB, for two buffers: one is loaded while the other is filled. A
            buffer is larger if a layer, or the tensors outside layers, need it.
        timeout: Timeout in seconds for a member that keeps the others waiting.
    """

    bucket_mib: int = 64
    timeout: float = 60.0
    _meeting: tuple[Any, Meeting] | None = attrs.field(init=False, default=None)
    _buffers: Buffers = attrs.field(init=False)

    def __attrs_post_init__(self) -> None:
        self._buffers = Buffers(self._size)

    @property
    def _size(self) -> int:
        return self.bucket_mib * MIB // 2

    @property
    def _patience(self) -> timedelta:
        return timedelta(seconds=self.timeout)

    def offer(self, parts: Iterator[Weights | None], engines: int, host: str) -> Meeting:
        """Open a store through which engines find this rank, and return its address."""
        store = _store(host, 0, self._patience, serves=True)
        meeting = Meeting(host, store.port, engines + 1)
        self._meeting = store, meeting
        return meeting

    def send(self, parts: Iterator[Weights | None]) -> None:
        """Send the weights once to the engines of the last offer; see `StreamsWeights.send`.

        Raises:
            TransferError: An engine did not connect in time, or left.
        """
        if self._meeting is None:
            raise TransferError("call send() once after each offer(); there is no open offer")
        (store, meeting), self._meeting = self._meeting, None
        version = -1
        with _group(store, 0, meeting, self._patience) as group:
            for weights in filled(parts, self._size):
                header, contents = announced(weights)
                version = header.version
                with naming(f"weights of version {version} were not sent to all engines"):
                    self._put(group, header, contents)
            with naming(f"weights of version {version} were not loaded by all engines"):
                self._put(group, Header(version), [])
                group.barrier().wait()  # no member leaves while others still read

    def _put(self, group: Any, header: Header, contents: list[np.ndarray]) -> None:
        """Send a bucket; one without contents ends the transfer."""
        head = np.frombuffer(header.dump(), np.uint8)
        broadcast(group, [np.array([len(head)]).view(np.uint8)])
        broadcast(group, [head])
        broadcast(group, contents)

    def receive(self, offer: Meeting, seat: int) -> Iterator[Weights]:
        """Yield the weights bucket by bucket; see `StreamsWeights.receive`.

        Raises:
            TransferError: The sender or another engine left, or exceeded the timeout.
        """
        with naming(f"the learner at {offer.host}:{offer.port} cannot be reached"):
            store = _store(offer.host, offer.port, self._patience, serves=False)
        with _group(store, seat, offer, self._patience) as group:
            while True:
                with naming("the learner announces no more weights"):
                    header = self._header(group)
                if not header.slots:
                    break
                yield self._received(group, header)
            with naming(f"weights of version {header.version} were not loaded by all engines"):
                group.barrier().wait()

    def _header(self, group: Any) -> Header:
        length = np.zeros(1, np.int64)
        broadcast(group, [length.view(np.uint8)])
        content = np.empty(int(length[0]), np.uint8)
        broadcast(group, [content])
        return Header.load(content.tobytes())

    def _received(self, group: Any, header: Header) -> Weights:
        """Receive a bucket; keep no reference to it here, since its buffer is reused."""
        buffer = self._buffers.take(header.size)
        with naming(f"weights of version {header.version} did not come to their end"):
            broadcast(group, [content for _, content in header.arrays(buffer)])
        return header.weights(buffer)


@contextmanager
def naming(what: str) -> Iterator[None]:
    """Convert exceptions of torch.distributed to `TransferError`."""
    try:
        yield
    except RuntimeError as error:
        # Strip gloo's source line and its advice.
        text = re.sub(r"^\[\S+\] ", "", str(error)).split(" This is typically")[0]
        raise TransferError(f"{what}: {text or type(error).__name__}") from error


def _store(host: str, port: int, patience: timedelta, *, serves: bool) -> Any:
    """Open or connect to the store through which group members find each other; port 0 chooses a free one."""
    from torch import distributed

    kind: Any = distributed.TCPStore  # type: ignore[attr-defined] # torch exports it without declaring so
    return kind(host, port, is_master=serves, timeout=patience, wait_for_workers=False)


@contextmanager
def _group(store: Any, rank: int, meeting: Meeting, patience: timedelta) -> Iterator[Any]:
    """Context manager: join the group of a transfer; leaving it always notifies the others.

    Raises:
        TransferError: Not all members joined in time.
    """
    import torch.distributed as dist

    with naming(f"{meeting.members - 1} engines and the learner did not meet at {meeting.host}:{meeting.port}"):
        kind: Any = dist.ProcessGroupGloo  # torch declares few of its types
        options = kind._Options()
        options._timeout = patience
        # Use the network that reaches the learner; a host name may resolve to another, or not at all.
        with socket.create_connection((meeting.host, meeting.port), patience.total_seconds()) as connection:
            options._devices = [kind.create_device(hostname=connection.getsockname()[0])]
        group = kind(store, rank, meeting.members, options)
    try:
        yield group
    finally:
        group.abort()  # connections close with the last reference to it


def broadcast(group: Any, contents: list[np.ndarray]) -> None:
    """Broadcast byte arrays from rank 0, several at once; all members know their sizes."""
    works = [group.broadcast(unpack(content, "uint8"), 0) for content in contents if len(content)]
    for work in works:
        work.wait()
