"""The transfer between engines and ranks that share GPUs, with tensors in shared host memory in place of a GPU's."""

from __future__ import annotations

import multiprocessing
import os
import socket
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import attrs
import numpy as np
import pytest
import torch

from rlsdk.contracts import SendsFromEachRank, Weights
from rlsdk.errors import TransferError
from rlsdk.transfers.cuda_ipc import CudaIpc, IpcOffer
from rlsdk.weights import checksums, joined, to_weights
from tests.ipv6 import needs_ipv6
from tests.transfers.parts import mixed

LAYERS = 12


@attrs.define(kw_only=True, eq=False, slots=False)
class IpcOnCPU(CudaIpc):
    """The transfer for GPUs with another device, whose id is given, and all else as it is."""

    gpu: str = "0"
    device = "cpu"

    def __attrs_post_init__(self) -> None:
        torch.multiprocessing.set_sharing_strategy("file_system")  # handles that any process can open, like a GPU's

    def _gpu(self) -> str:
        return self.gpu


@pytest.fixture(autouse=True)
def _strategy() -> Iterator[None]:
    before = torch.multiprocessing.get_sharing_strategy()
    yield
    torch.multiprocessing.set_sharing_strategy(before)


def layers(rank: int = 0) -> Iterator[Weights]:
    """Yield 12 layers of 1 MiB, whose values tell layer and rank."""
    for index in range(LAYERS):
        yield to_weights(5, {f"{index}.weight": torch.full((2**18,), 100.0 * rank + index)}, host=False)


def received(offers: Sequence[IpcOffer], gpu: str = "0", leave_after: int = LAYERS) -> list[float]:
    """Return the value of each layer that an engine on a GPU receives."""
    found = []
    for part in IpcOnCPU(bucket_mib=6, timeout=20, gpu=gpu).receive(offers, 1):
        for tensor in part.tensors.values():
            assert isinstance(tensor, torch.Tensor) and (tensor == tensor[0]).all()
            found.append(float(tensor[0]))
        if len(found) > leave_after:
            os._exit(1)
    return found


@pytest.mark.parametrize("host", ["127.0.0.1", pytest.param("::1", marks=needs_ipv6)])
def test_each_engine_gets_the_weights_of_the_rank_on_its_gpu_and_other_ranks_do_not_wait(host: str) -> None:
    ranks = [IpcOnCPU(bucket_mib=6, timeout=20, gpu=str(gpu)) for gpu in range(3)]
    assert isinstance(ranks[0], SendsFromEachRank)
    for _ in range(2):  # an instance performs many transfers
        offers = [rank.offer(iter(()), 2, host) for rank in ranks]
        with ThreadPoolExecutor(5) as pool:
            sent = [pool.submit(rank.send, layers(index)) for index, rank in enumerate(ranks)]
            got = {gpu: pool.submit(received, offers, gpu) for gpu in ("2", "0")}
            for each in sent:
                each.result()
        assert {gpu: each.result() for gpu, each in got.items()} == {
            gpu: [100.0 * int(gpu) + index for index in range(LAYERS)] for gpu in ("0", "2")
        }


def test_every_bit_arrives_in_another_process_and_buckets_that_are_held_are_not_overwritten() -> None:
    parts = mixed(torch.randn(7, 300).bfloat16())
    sender = IpcOnCPU(bucket_mib=1)
    offers = [sender.offer(iter(()), 2, "127.0.0.1")]
    context = multiprocessing.get_context("spawn")
    answers: Any = context.SimpleQueue()
    engine = context.Process(target=answer, args=(offers, answers))
    engine.start()
    with ThreadPoolExecutor(1) as pool:
        near = pool.submit(lambda: list(IpcOnCPU(bucket_mib=1).receive(offers, 1)))
        sender.send(iter(parts))
        got = near.result()
    engine.join()
    found, expected = joined(got), joined(parts)
    assert len(got) == 3 and found is not None and expected is not None
    assert found.tensors["embeddings"] is found.tensors["head"]
    assert found.dtypes == expected.dtypes
    assert checksums(found) == checksums(expected) == answers.get()


def answer(offers: Sequence[IpcOffer], answers: Any) -> None:
    found = joined(list(IpcOnCPU(bucket_mib=1).receive(offers, 2)))
    assert found is not None
    answers.put(checksums(found))


def test_an_engine_that_is_killed_in_the_middle_ends_the_transfer_of_its_rank_at_once() -> None:
    ranks = [IpcOnCPU(bucket_mib=6, timeout=60, gpu=str(gpu)) for gpu in range(2)]
    offers = [rank.offer(iter(()), 2, "127.0.0.1") for rank in ranks]
    mortal = multiprocessing.get_context("spawn").Process(target=received, args=(offers, "1", 3))
    mortal.start()
    with ThreadPoolExecutor(2) as pool:
        other = pool.submit(received, offers, "0")
        first = pool.submit(ranks[0].send, layers())
        with pytest.raises(TransferError, match="weights of version 5 were not sent to the engines on this GPU: "):
            ranks[1].send(layers(1))
        mortal.join()
        ended = time.monotonic()
        first.result()
        assert len(other.result()) == LAYERS
        assert time.monotonic() - ended < 10  # nobody waits for the limit
    assert mortal.exitcode == 1


def test_an_engine_without_a_rank_on_its_gpu_is_told_so_and_a_rank_does_not_wait_for_it() -> None:
    sender = IpcOnCPU(timeout=20)
    offers = [sender.offer(iter(()), 1, "127.0.0.1")]
    with ThreadPoolExecutor(1) as pool:
        sent = pool.submit(sender.send, layers())
        with pytest.raises(TransferError, match="no rank of the learner is on this engine's GPU"):
            list(IpcOnCPU(gpu="7").receive(offers, 1))
        sent.result()


def test_strangers_are_turned_away_and_missing_members_are_named() -> None:
    sender = IpcOnCPU(timeout=1)
    (offer,) = offers = [sender.offer(iter(()), 1, "127.0.0.1")]
    with ThreadPoolExecutor(2) as pool, socket.create_connection((offer.host, offer.port)) as stranger:
        stranger.sendall(bytes(len(offer.secret)) + b"\1")
        sent = pool.submit(sender.send, layers())
        assert received(offers) == list(range(LAYERS))
        sent.result()
    with pytest.raises(TransferError, match="there is no open offer"):
        sender.send(layers())
    with pytest.raises(TransferError, match=rf"rank 0 of the learner at 127\.0\.0\.1:{offer.port} cannot be reached"):
        received(offers)
    offer = sender.offer(iter(()), 1, "127.0.0.1")
    with pytest.raises(TransferError, match=rf"1 engine and the learner did not meet at 127\.0\.0\.1:{offer.port}: "):
        sender.send(layers())


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_without_a_gpu_it_says_so() -> None:
    with pytest.raises(TransferError, match="cuda_ipc needs a GPU in this process"):
        CudaIpc().offer(iter(()), 1, "127.0.0.1")


def regions() -> set[str]:
    """Return the shared memory of this process's tensors."""
    return {name for name in os.listdir("/dev/shm") if name.startswith(f"torch_{os.getpid()}_")}


def test_memory_is_one_region_of_the_sender_which_engines_close() -> None:
    before = regions()  # of failed transfers, whose errors pytest still holds
    sender = IpcOnCPU(bucket_mib=6, timeout=20)
    offers = [sender.offer(iter(()), 1, "127.0.0.1")]
    with ThreadPoolExecutor(1) as pool:
        sent = pool.submit(sender.send, layers())
        parts = IpcOnCPU(bucket_mib=6, timeout=20).receive(offers, 1)
        sizes, most = [], 0
        for part in parts:
            sizes.append(sum(np.prod(tensor.shape) * 4 for tensor in part.tensors.values()))
            most = max(most, len(regions() - before))
        sent.result()
    assert sizes == [2**21] * (LAYERS // 2)  # a third of 6 MiB, two layers of 1 MiB
    assert most == 1 and regions() <= before
