"""The weight transfers `gloo` and `nccl`: rank 0 of the learner broadcasts buckets to all engines."""

from __future__ import annotations

import socket
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING, Any, ClassVar

import attrs
import numpy as np

from rlsdk.contracts import Weights
from rlsdk.errors import TransferError
from rlsdk.isolation.process import environment_variable
from rlsdk.marks import weight_transfer
from rlsdk.transfers.buckets import MIB, Buffers, Header, announced, filled, open_offer, transfer_errors
from rlsdk.weights import unpack

if TYPE_CHECKING:
    from torch import Tensor

BLOCKING_WAIT = "TORCH_NCCL_BLOCKING_WAIT"
"""Environment variable: `1` makes NCCL's waits raise errors instead of ending the process."""


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


@attrs.define(kw_only=True, eq=False, slots=False)
class Broadcast(ABC):
    """Broadcast weights to all engines at once, bucket by bucket, in a process group that lives for one transfer.

    Attributes:
        bucket_mib: Size of two buckets, in MiB.
        timeout: Timeout in seconds for a member that keeps the others waiting.
        backend: Backend of torch.distributed.
        device: Device of the tensors that the backend sends.
    """

    bucket_mib: int = 64
    timeout: float = 60.0
    backend: ClassVar[str]
    device: ClassVar[str]
    _meeting: tuple[Any, Meeting] | None = attrs.field(init=False, default=None)

    @property
    def _size(self) -> int:
        return self.bucket_mib * MIB // 2

    @property
    def _patience(self) -> timedelta:
        return timedelta(seconds=self.timeout)

    def arriving_bytes(self, largest: int) -> int:
        """Return the bytes of buckets; see `SizesBuckets`."""
        return self._size + max(self._size, largest)

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
        (store, meeting), self._meeting = open_offer(self._meeting), None
        version = -1
        with self._group(store, 0, meeting) as group:
            for weights in filled(parts, self._size):
                header, contents = announced(weights)
                version = header.version
                with transfer_errors(f"weights of version {version} were not sent to all engines"):
                    self._put(group, header, contents)
            with transfer_errors(f"weights of version {version} were not loaded by all engines"):
                self._put(group, Header(version), [])
                self._await_all(group)

    def _put(self, group: Any, header: Header, contents: list[np.ndarray | Tensor]) -> None:
        """Send a bucket; one without contents ends the transfer."""
        head = np.frombuffer(header.dump(), np.uint8)
        for sent in ([np.array([len(head)]).view(np.uint8)], [head], contents):
            self._share(group, sent)

    def receive(self, offer: Meeting, seat: int) -> Iterator[Weights]:
        """Yield the weights bucket by bucket; see `StreamsWeights.receive`.

        Raises:
            TransferError: The sender or another engine left, or exceeded the timeout.
        """
        with transfer_errors(f"the learner at {offer.host}:{offer.port} cannot be reached"):
            store = _store(offer.host, offer.port, self._patience, serves=False)
        with self._group(store, seat, offer) as group:
            while True:
                with transfer_errors("the learner announces no more weights"):
                    header = self._header(group)
                if not header.slots:
                    break
                yield self._received(group, header)
            with transfer_errors(f"weights of version {header.version} were not loaded by all engines"):
                self._await_all(group)

    def _header(self, group: Any) -> Header:
        (length,) = self._share(group, [np.empty(8, np.uint8)])
        (content,) = self._share(group, [np.empty(int(length.cpu().numpy().view(np.int64)[0]), np.uint8)])
        return Header.load(content.cpu().numpy().tobytes())

    def _received(self, group: Any, header: Header) -> Weights:
        """Receive a bucket; keep no reference to it here, since its buffer is reused."""
        buffer = self._buffer(header.size)
        with transfer_errors(f"weights of version {header.version} did not come to their end"):
            self._share(group, header.contents(buffer))
        return header.weights(buffer)

    @abstractmethod
    def _buffer(self, size: int) -> Any:
        """Return an unused buffer of at least `size` bytes."""

    def _share(self, group: Any, contents: Sequence[np.ndarray | Tensor]) -> list[Tensor]:
        """Broadcast bytes from rank 0, several tensors at once; all members know their sizes.

        Returns:
            The tensors, on `device`. Those that are on the device already are sent and received in place.
        """
        given = (unpack(content, "uint8") if isinstance(content, np.ndarray) else content for content in contents)
        tensors = [content.to(self.device) for content in given]
        for work in [group.broadcast(tensor, 0) for tensor in tensors if len(tensor)]:
            work.wait()
        return tensors

    def _await_all(self, group: Any) -> None:
        """Wait for all members, so that none leaves while others still read."""
        import torch

        group.allreduce([torch.zeros(1, device=self.device)]).wait()

    @contextmanager
    def _group(self, store: Any, rank: int, meeting: Meeting) -> Iterator[Any]:
        """Context manager: join the group of a transfer; leaving it always notifies the others.

        Raises:
            TransferError: Not all members joined in time.
        """
        with transfer_errors(
            f"{meeting.members - 1} engines and the learner did not meet at {meeting.host}:{meeting.port}"
        ):
            # NCCL would wait for a missing member without a limit.
            store.set(f"rlsdk/{rank}", b"here")
            store.wait([f"rlsdk/{member}" for member in range(meeting.members)], self._patience)
            group = GROUPS[self.backend](store, rank, meeting, self._patience)
        try:
            yield group
        finally:
            group.abort()  # connections close with the last reference to it


@weight_transfer("gloo")
@attrs.define(kw_only=True, eq=False, slots=False)
class Gloo(Broadcast):
    """Broadcast weights to all engines at once over TCP, bucket by bucket.

    Engines may join and leave between transfers. They do not sample while they load. Engines that a failed transfer
    leaves with mixed versions load all weights from Ray's object store.

    When to use: on several machines without GPUs, if a copy of all weights does not fit in memory next to the model. On
    one machine, `shared_memory` is faster, since sockets copy data more often.

    Attributes:
        bucket_mib: Receive memory of each engine, in MiB, for two buffers: one is loaded while the other is filled. A
            buffer is larger if a layer, or the tensors outside layers, need it.
        timeout: Timeout in seconds for a member that keeps the others waiting.
    """

    backend: ClassVar[str] = "gloo"
    device: ClassVar[str] = "cpu"
    _buffers: Buffers = attrs.field(init=False)

    def __attrs_post_init__(self) -> None:
        self._buffers = Buffers(self._size)

    def _buffer(self, size: int) -> np.ndarray:
        return self._buffers.take(size)


@weight_transfer("nccl")
@attrs.define(kw_only=True, eq=False, slots=False)
class Nccl(Broadcast):
    """Broadcast weights from the learner's GPU to those of all engines, bucket by bucket, without copies on the host.

    Engines may join and leave between transfers. They do not sample while they load. Engines that a failed transfer
    leaves with mixed versions load all weights from Ray's object store.

    When to use: if engines and learner have separate GPUs (`placement.colocate: false`), since NCCL needs a GPU for
    each. It has never run on a GPU; CI runs the same code over gloo.

    Attributes:
        bucket_mib: GPU memory of each engine for received weights, in MiB, as two buckets: one is loaded while the
            other is filled. A bucket is larger if a layer, or the tensors outside layers, need it.
        timeout: Timeout in seconds for a member that keeps the others waiting.
    """

    bucket_mib: int = 1024
    backend: ClassVar[str] = "nccl"
    device: ClassVar[str] = "cuda"

    def _buffer(self, size: int) -> Tensor:
        import torch

        # torch reuses its memory once the engine has loaded the tensors, which may outlive this bucket.
        return torch.empty(size, dtype=torch.uint8, device=self.device)


def _store(host: str, port: int, patience: timedelta, *, serves: bool) -> Any:
    """Open or connect to the store through which group members find each other; port 0 chooses a free one."""
    from torch import distributed

    kind: Any = distributed.TCPStore  # type: ignore[attr-defined] # torch exports it without declaring so
    return kind(host, port, is_master=serves, timeout=patience, wait_for_workers=False)


def _gloo(store: Any, rank: int, meeting: Meeting, patience: timedelta) -> Any:
    import torch.distributed as dist

    kind: Any = dist.ProcessGroupGloo  # torch declares few of its types
    options = kind._Options()
    options._timeout = patience
    options._threads = 8  # number of tensors sent at once; each takes round trips, and by default it is 2
    # Use the network that reaches the learner; a host name may resolve to another, or not at all.
    with socket.create_connection((meeting.host, meeting.port), patience.total_seconds()) as connection:
        options._devices = [kind.create_device(hostname=connection.getsockname()[0])]
    return kind(store, rank, meeting.members, options)


def _nccl(store: Any, rank: int, meeting: Meeting, patience: timedelta) -> Any:
    import torch.distributed as dist
    from torch import cuda

    if not (dist.is_nccl_available() and cuda.is_available()):
        raise TransferError("NCCL needs a GPU in this process, and a torch built for it")
    kind: Any = dist.ProcessGroupNCCL
    options = kind.Options()
    options._timeout = patience
    # By default, a member that leaves or is late ends this process. With this setting, waiting for it raises an error.
    # Groups read it when they are created: the learner's own keep the default.
    with environment_variable(BLOCKING_WAIT, "1"):
        return kind(store, rank, meeting.members, options)


GROUPS: Mapping[str, Callable[[Any, int, Meeting, timedelta], Any]] = {"gloo": _gloo, "nccl": _nccl}
"""How a member joins the process group of a transfer, by backend."""
