"""The weight transfer `cuda_ipc`: each rank of the learner shares GPU memory with the engines on its GPU."""

from __future__ import annotations

import pickle
import secrets
import socket
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from multiprocessing.reduction import ForkingPickler
from typing import TYPE_CHECKING, Any, ClassVar

import attrs

from rlsdk.contracts import Weights
from rlsdk.errors import TransferError
from rlsdk.isolation.framing import exactly, receive, send
from rlsdk.marks import weight_transfer
from rlsdk.plurals import counted
from rlsdk.transfers.buckets import MIB, Header, announced, filled, open_offer, transfer_errors

if TYPE_CHECKING:
    from torch import Tensor

_SECRET = 16
"""Bytes that an engine sends first, to show that it was given the offer; 1 follows if it is on the rank's GPU, or 0."""
_DONE = b"\1"
"""An engine's message: it is ready for the first bucket, or has copied one, or has loaded the last one."""


@attrs.frozen
class IpcOffer:
    """Where one rank of the learner waits for engines.

    Attributes:
        host: Address of its node.
        port: Port on which it listens.
        secret: Bytes that admit an engine.
        gpu: Id of its GPU.
    """

    host: str
    port: int
    secret: bytes
    gpu: str


@weight_transfer("cuda_ipc")
@attrs.define(kw_only=True, eq=False, slots=False)
class CudaIpc:
    """Share buckets of weights in GPU memory, between engines and the ranks of the learner on the same GPUs.

    Each rank fills a bucket, and sends a handle of its memory (CUDA IPC) to the engine on its GPU, which copies it.
    Nothing passes through host memory or a network. Engines do not sample while they load. Engines that a failed
    transfer leaves with mixed versions load all weights from Ray's object store.

    When to use: if engines and learner share GPUs (`placement.colocate`), with one GPU for each engine. It has never
    run on a GPU; CI runs the same code with tensors in shared host memory.

    Attributes:
        bucket_mib: Memory of each GPU for buckets, in MiB: the one that the learner fills, and two copies, of which an
            engine loads one while it receives the other. A bucket is larger if a layer, or the tensors outside layers,
            need it.
        timeout: Timeout in seconds for a member that keeps the others waiting.
    """

    bucket_mib: int = 768
    timeout: float = 60.0
    device: ClassVar[str] = "cuda"
    each_rank: ClassVar[bool] = True
    _server: tuple[socket.socket, IpcOffer, int] | None = attrs.field(init=False, default=None)

    @property
    def _size(self) -> int:
        return self.bucket_mib * MIB // 3

    def arriving_bytes(self, largest: int) -> int:
        """Return the bytes of buckets on a GPU, those of its rank included; see `SizesBuckets`."""
        return self._size + 2 * max(self._size, largest)

    def offer(self, parts: Iterator[Weights | None], engines: int, host: str) -> IpcOffer:
        """Listen for the engines, and return where; called on every rank."""
        if self._server is not None:  # of an offer without a transfer
            self._server[0].close()
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        server = socket.create_server((host, 0), family=family, backlog=max(engines, 1))
        server.settimeout(self.timeout)
        offer = IpcOffer(host, server.getsockname()[1], secrets.token_bytes(_SECRET), self._gpu())
        self._server = server, offer, engines
        return offer

    def send(self, parts: Iterator[Weights | None]) -> None:
        """Send this rank's weights once to the engines on its GPU; see `StreamsWeights.send`.

        Raises:
            TransferError: An engine did not connect in time, or left.
        """
        (server, offer, count), self._server = open_offer(self._server), None
        with ExitStack() as stack:  # closing a connection notifies its engine
            stack.enter_context(server)
            with transfer_errors(
                f"{counted(count, 'engine')} and the learner did not meet at {offer.host}:{offer.port}"
            ):
                engines = self._accepted(server, offer, count, stack)
            if engines:
                self._send(parts, engines)

    def _accepted(
        self, server: socket.socket, offer: IpcOffer, count: int, stack: ExitStack
    ) -> Sequence[socket.socket]:
        """Wait until all engines have connected; return the connections of those on this GPU.

        Only an engine knows its GPU, so each engine connects to every rank.
        """
        engines: list[socket.socket] = []
        while count:
            engine, _ = server.accept()
            stack.enter_context(engine)
            engine.settimeout(self.timeout)
            said = exactly(engine, _SECRET + 1)
            if secrets.compare_digest(said[:_SECRET], offer.secret):
                count -= 1
                engines += [engine] * said[-1]
        return engines

    def _send(self, parts: Iterator[Weights | None], engines: Sequence[socket.socket]) -> None:
        """Send all buckets through one region of GPU memory, which is freed at the end."""
        import torch

        region, version = torch.empty(0, dtype=torch.uint8, device=self.device), -1
        for weights in filled(parts, self._size):
            header, contents = announced(weights)
            version = header.version
            with transfer_errors(f"weights of version {version} were not sent to the engines on this GPU"):
                _await(engines)  # they have copied the previous bucket
                grows = len(region) < header.size
                if grows:
                    region = torch.empty(header.size, dtype=torch.uint8, device=self.device)
                for target, content in zip(header.contents(region), contents, strict=True):
                    target.copy_(content)
                self._synchronise()
                self._announce(engines, header, region if grows else None)
        with transfer_errors(f"weights of version {version} were not loaded by the engines on this GPU"):
            _await(engines)
            self._announce(engines, Header(version), None)
            _await(engines)

    def _announce(self, engines: Sequence[socket.socket], header: Header, region: Tensor | None) -> None:
        """Announce a bucket, with a handle of its memory if engines have not opened it yet."""
        for engine in engines:  # each needs a handle of its own, since torch counts who has opened the memory
            send(engine, bytes(ForkingPickler.dumps((header, region))))  # of a tensor, torch makes it pickle a handle

    def receive(self, offer: Sequence[IpcOffer], seat: int) -> Iterator[Weights]:
        """Yield the weights bucket by bucket; see `StreamsWeights.receive`.

        Raises:
            TransferError: No rank of the learner is on this engine's GPU, or the rank left or exceeded the timeout.
        """
        gpus, gpu = [each.gpu for each in offer], self._gpu()
        with ExitStack() as stack:
            learner: socket.socket | None = None
            for rank, each in enumerate(offer):
                near = gpu in gpus and rank == gpus.index(gpu)
                with transfer_errors(f"rank {rank} of the learner at {each.host}:{each.port} cannot be reached"):
                    connection = socket.create_connection((each.host, each.port), self.timeout)
                    stack.enter_context(connection)
                    connection.sendall(each.secret + bytes([near]))
                if near:
                    learner = connection
            if learner is None:
                raise TransferError("no rank of the learner is on this engine's GPU; use weight_transfer=object_store")
            yield from self._received(learner)

    def _received(self, learner: socket.socket) -> Iterator[Weights]:
        region: Any = None
        with transfer_errors("the learner announces no more weights"):
            learner.sendall(_DONE)
        while True:
            with transfer_errors("the learner announces no more weights"):
                header, opened = pickle.loads(receive(learner))  # noqa: S301 - from the learner, which is trusted
                if not header.slots:
                    break
                region = region if opened is None else opened
                bucket = region[: header.size].clone()  # torch reuses its memory once nothing refers to it
                self._synchronise()
                learner.sendall(_DONE)
            weights = header.weights(bucket)
            del bucket
            yield weights
            del weights
        region = opened = None  # closes the handle
        with transfer_errors("the learner left"):
            learner.sendall(_DONE)

    def _gpu(self) -> str:
        """Return the id of this process's GPU, which is the same in all processes."""
        import torch

        if not torch.cuda.is_available():
            raise TransferError("cuda_ipc needs a GPU in this process, and a torch built for it")
        return str(torch.cuda.get_device_properties(torch.cuda.current_device()).uuid)

    def _synchronise(self) -> None:
        """Wait until the GPU has finished the copies; another process does not see this one's stream."""
        import torch

        if self.device == "cuda":
            torch.cuda.synchronize()


def _await(engines: Sequence[socket.socket]) -> None:
    for engine in engines:
        exactly(engine, len(_DONE))
