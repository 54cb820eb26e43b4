"""Communication between the ranks of a learner; a single rank sends nothing."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any

import attrs
from packaging.version import Version

from rlsdk.cluster.compiled import compiler_environment
from rlsdk.cluster.health import unreachable
from rlsdk.contracts import ActorSpec
from rlsdk.preflight import version

_PATIENCE = 60.0
"""Seconds to wait for rank 0 to listen, before torch tries and reports the failure."""
_MEETING = timedelta(minutes=10)
"""Time for all ranks to connect."""
_WAITING = timedelta(hours=6)
"""Time that ranks wait for each other in a collective, such as for rank 0, which writes the exported model. By default,
NCCL ends the process after 10 minutes. Ranks that die or do nothing are noticed earlier, by Ray and the watchdog."""

_ALLOCATOR = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")
"""Environment variables of torch's allocators, of which only one is read."""


@attrs.frozen
class Ranks:
    """The learner's process group."""

    rank: int
    world: int
    device: str

    @classmethod
    def join(cls, rank: int, world: int, device: str, master: str) -> Ranks:
        """Join the process group of the learner.

        Args:
            rank: Rank of this process.
            world: Number of ranks.
            device: cpu (gloo) or cuda (nccl).
            master: host:port; a single rank may leave it out.
        """
        import torch.distributed as dist

        if not dist.is_initialized():
            stores: Any = dist  # torch exports them without declaring so
            if world == 1:
                store = stores.HashStore()  # needs no port
            else:
                if rank > 0:
                    await_listener(master)
                host, _, port = master.rpartition(":")
                store = stores.TCPStore(host, int(port), world, rank == 0, timeout=_MEETING)
            backend = "nccl" if device == "cuda" else "gloo"
            dist.init_process_group(backend, rank=rank, world_size=world, store=store, timeout=_WAITING)
        return cls(rank, world, device)

    def all_reduce_max(self, counts: Sequence[int]) -> list[int]:
        """Return the element-wise maximum over all ranks; every rank passes the same number of elements."""
        if self.world == 1 or not counts:
            return list(counts)
        import torch
        import torch.distributed as dist

        greatest = torch.tensor(list(counts), dtype=torch.int64, device=self.device)
        dist.all_reduce(greatest, op=dist.ReduceOp.MAX)
        return [int(c) for c in greatest.tolist()]

    def gather(self, value: Any) -> list[Any]:
        """Return every rank's value, by rank, on all ranks; values must be picklable."""
        if self.world == 1:
            return [value]
        import torch.distributed as dist

        values: list[Any] = [None] * self.world
        dist.all_gather_object(values, value)
        return values


def await_listener(address: str) -> None:
    """Wait until host:port accepts connections; torch would retry only after half a second."""
    deadline = time.monotonic() + _PATIENCE
    while unreachable(address, seconds=1) and time.monotonic() < deadline:
        time.sleep(0.01)


def environment(place: ActorSpec, *, compiled: bool) -> Mapping[str, str]:
    """Return the environment variables of a rank, to set before its process imports anything.

    Args:
        place: Placement of the rank.
        compiled: True if its models are compiled.
    """
    allocator: dict[str, str] = {}
    users_own = any(os.environ.get(name) for name in _ALLOCATOR)
    if place.device == "cuda" and not users_own and Version(version("torch") or "0") >= Version("2.13"):
        # Do not round pinned host memory, such as that of a sleeping learner, up to a power of two.
        allocator = {"PYTORCH_ALLOC_CONF": "pinned_max_round_threshold_mb:16"}
    return {
        **place.environment(),
        **allocator,
        **compiler_environment(place, compiled=compiled),
        "DS_ACCELERATOR": place.device,
        "RANK": str(place.rank),
        "WORLD_SIZE": str(place.world_size),
        # On GPUs, Ray shows each rank only its own GPU, as number 0; on CPUs, this is the rank's number.
        "LOCAL_RANK": "0" if place.device == "cuda" else str(place.rank),
        # DeepSpeed calls collectives by deprecated names, and torch warns at every call.
        "PYTHONWARNINGS": "ignore::FutureWarning:torch.distributed.c10d_logger",
    }
