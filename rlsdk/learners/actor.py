"""Ray actor of one rank of the learner, and the weights that it sends to engines."""

from __future__ import annotations

import contextlib
import os
import random
import socket
from typing import TYPE_CHECKING, Any

from rlsdk.cluster.actors import RunActor
from rlsdk.cluster.compiled import keep_compiled
from rlsdk.contracts import (
    ActorSpec,
    GivesRankTensors,
    GivesWeightParts,
    GivesWeightTensors,
    HasClock,
    LossSpec,
    Roles,
    SendsFromEachRank,
    StreamsTensors,
    StreamsWeights,
)
from rlsdk.errors import LearnerError, TransferError
from rlsdk.isolation.process import settle
from rlsdk.isolation.vitals import peak_memory
from rlsdk.plugins import ComponentRef, Plugins

if TYPE_CHECKING:
    from rlsdk.contracts import Learner, Weights

_PORTS = range(20_000, 32_000)
"""Above the ports of Ray's workers and below the system's ephemeral ports. Until rank 0 listens, an ephemeral port
could go to another program, or a rank that tries to reach rank 0 could connect to itself."""


class LearnerActor(RunActor):
    """Ray actor of one learner rank; the wrapped plugin learner does not depend on Ray."""

    def __init__(self, log_path: str) -> None:
        super().__init__(log_path)
        self._learner: Learner
        self._transfer: Any = None
        self._sends = True
        self._profile: Any = None

    def where(self) -> tuple[str, int]:
        """Return the address of this process's node, and a free port there."""
        host = _host()
        for port in random.SystemRandom().sample(_PORTS, len(_PORTS)):
            with socket.socket() as probe, contextlib.suppress(OSError):
                probe.bind(("", port))
                return host, port
        raise LearnerError(f"no port between {_PORTS.start} and {_PORTS.stop} is free; ranks need one to connect")

    def sees(self, path: str) -> tuple[str, bool]:
        """Return the address of this process's node, and whether it sees a file."""
        return _host(), os.path.exists(path)

    def start(
        self,
        reference: ComponentRef,
        roles: Roles,
        loss: LossSpec,
        place: ActorSpec,
        total_updates: int,
        transfer: ComponentRef | None = None,
    ) -> None:
        """Resolve and start the learner; `transfer` sends its weights to engines."""
        self._learner = Plugins().resolve(reference)
        self._transfer = None if transfer is None else Plugins().resolve(transfer)
        self._sends = place.rank == 0 or isinstance(self._transfer, SendsFromEachRank)
        self._learner.start(roles, loss, keep_compiled(self._learner, place), total_updates)
        settle()

    def call(self, method: str, *args: Any, **options: Any) -> Any:
        """Call a method of the learner."""
        if self._profile is None:
            return getattr(self._learner, method)(*args, **options)
        from torch.profiler import record_function

        with record_function(f"learner.{method}"):
            return getattr(self._learner, method)(*args, **options)

    def start_profile(self, record: bool, details: bool) -> None:
        """Start torch's profiler.

        Args:
            record: False on a rank that is not recorded.
            details: Also record shapes, memory and Python stacks.
        """
        if not record:
            return
        import torch
        from torch.profiler import ProfilerActivity, profile

        devices = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if torch.cuda.is_available() else [])]
        self._profile = profile(activities=devices, record_shapes=details, profile_memory=details, with_stack=details)
        self._profile.start()

    def stop_profile(self, file: str) -> None:
        """Stop the profiler, and write what it recorded as a Chrome trace; nothing on a rank that is not recorded."""
        profile, self._profile = self._profile, None
        if profile is not None:
            profile.stop()
            profile.export_chrome_trace(file)

    def weights(self, method: str, version: int) -> tuple[None, Weights | None]:
        """Return None, as a "done" marker for the driver, and the weights for the engines (rank 0; None elsewhere)."""
        return None, getattr(self._learner, method)(version)

    def offer(self, method: str, version: int, engines: int) -> tuple[None, Any]:
        """Return what engines need to receive the weights, in a pair as `weights` does.

        None on ranks that do not send, which are all but rank 0 with most transfers.
        """
        streams = isinstance(self._transfer, StreamsWeights)
        parts = () if streams else (getattr(self._learner, method)(version),)
        return None, self._transfer.offer(iter(parts), engines, _host()) if self._sends else None

    def send(self, version: int) -> str:
        """Send the weights to the engines of the last offer; return why that failed, or an empty string."""
        learner = self._learner
        if isinstance(self._transfer, SendsFromEachRank) and isinstance(learner, GivesRankTensors):
            parts = learner.rank_weight_tensors(version)
        elif isinstance(self._transfer, StreamsTensors) and isinstance(learner, GivesWeightTensors):
            parts = learner.weight_tensors(version)
        elif isinstance(learner, GivesWeightParts):
            parts = learner.weight_parts(version)
        else:
            parts = iter((learner.weights(version),))
        fault = ""
        try:
            if self._sends:
                self._transfer.send(parts)
        except TransferError as error:
            fault = str(error)
        finally:
            for _ in parts:  # reading each part is collective
                pass
        return fault

    def checksums(self, method: str) -> dict[str, str] | None:
        """Return the CRC-32 of each tensor that `method` returns now (rank 0; None elsewhere)."""
        from rlsdk.weights import checksums

        weights = getattr(self._learner, method)(-1)
        return None if weights is None else checksums(weights)

    def clock(self) -> dict[str, float]:
        """Return the learner's timings, if it has a clock, and the peak memory of its process.

        Memory is in bytes: main memory and, on a GPU, allocated and reserved memory.
        """
        import torch

        counters = dict(self._learner.clock()) if isinstance(self._learner, HasClock) else {}
        counters["host_bytes"] = float(peak_memory())
        if torch.cuda.is_available():
            counters["gpu_bytes"] = float(torch.cuda.max_memory_allocated())
            counters["gpu_held_bytes"] = float(torch.cuda.max_memory_reserved())
        return counters


def _host() -> str:
    """Return the address of this process's node."""
    import ray

    return str(ray.util.get_node_ip_address())
