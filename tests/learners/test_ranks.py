"""Ranks connect as soon as rank 0 listens."""

from __future__ import annotations

import multiprocessing
import os
import socket
import subprocess
import sys
import threading
import time

import pytest

from rlsdk.learners import ranks
from tests.ipv6 import needs_ipv6
from tests.ports import free_port


def test_a_rank_waits_until_rank_0_listens() -> None:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{server.getsockname()[1]}"
        waiting = threading.Thread(target=ranks.await_listener, args=(address,))
        waiting.start()
        time.sleep(0.1)
        assert waiting.is_alive()
        server.listen()
        server.accept()[0].close()
        waiting.join(10)
        assert not waiting.is_alive()


def test_a_rank_leaves_it_to_torch_to_report_that_nothing_listens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranks, "_PATIENCE", 0.05)
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        ranks.await_listener(f"127.0.0.1:{server.getsockname()[1]}")


def _greatest(rank: int, master: str) -> list[int]:
    return ranks.Ranks.join(rank, 2, "cpu", master).all_reduce_max([rank])


def _patience() -> float:
    import torch
    import torch.distributed as dist

    ranks.Ranks.join(0, 1, "cpu", "")
    group: object = dist.group.WORLD
    return float(group._get_backend(torch.device("cpu")).options._timeout.total_seconds())  # type: ignore[attr-defined]


@pytest.mark.slow
def test_ranks_wait_for_one_that_writes_for_hours() -> None:
    """By default, NCCL ends a process whose collective takes 10 minutes."""
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        assert pool.apply(_patience) >= 3600


_DEEPSPEED = """
from rlsdk.learners.deepspeed import DeepSpeedLearner
DeepSpeedLearner().preload()
import deepspeed.ops
print("__compatible_ops__" in vars(deepspeed.ops))
"""


@pytest.mark.slow
@pytest.mark.parametrize(("device", "tried"), [("cpu", "True"), ("cuda", "False")])
def test_deepspeed_does_not_try_its_extensions_on_a_gpu(device: str, tried: str) -> None:
    variables = {**os.environ, "DS_ACCELERATOR": device}
    ran = subprocess.run([sys.executable, "-c", _DEEPSPEED], capture_output=True, text=True, env=variables, check=True)
    assert ran.stdout.splitlines()[-1] == tried


@needs_ipv6
@pytest.mark.slow
def test_ranks_meet_at_an_address_of_ipv6() -> None:
    master = f"::1:{free_port('::1')}"
    with multiprocessing.get_context("spawn").Pool(2, maxtasksperchild=1) as pool:
        assert pool.starmap(_greatest, [(0, master), (1, master)], chunksize=1) == [[1], [1]]
