"""Weights between GPUs and within one: transfers begin and end, and every bit arrives; on a machine with GPUs only."""

from __future__ import annotations

import multiprocessing
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

from rlsdk.contracts import Weights
from rlsdk.errors import TransferError
from rlsdk.transfers.broadcast import Nccl
from rlsdk.transfers.cuda_ipc import CudaIpc, IpcOffer
from rlsdk.weights import checksums, joined, to_weights

pytestmark = pytest.mark.gpu


def weights(device: str) -> Weights:
    random = torch.Generator().manual_seed(0)
    tensors = {f"{i}.weight": torch.randn(512, 1000, generator=random).bfloat16().to(device) for i in range(12)}
    return to_weights(3, tensors, host=False)


def test_a_group_forms_and_ends_and_a_late_engine_ends_the_transfer_but_not_the_process() -> None:
    sender = Nccl(bucket_mib=1, timeout=5)
    for _ in range(2):
        sender.offer(iter(()), 0, "127.0.0.1")
        sender.send(iter((weights("cuda"),)))
    sender.offer(iter(()), 1, "127.0.0.1")
    with pytest.raises(TransferError, match="did not meet"):
        sender.send(iter((weights("cuda"),)))


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_every_bit_arrives_on_another_gpu() -> None:
    sender, receiver = Nccl(bucket_mib=2, timeout=30), Nccl(bucket_mib=2, timeout=30)
    offer = sender.offer(iter(()), 1, "127.0.0.1")

    def received() -> Weights | None:
        torch.cuda.set_device(1)
        return joined(receiver.receive(offer, 1))

    with ThreadPoolExecutor(1) as pool:
        got = pool.submit(received)
        sender.send(iter((weights("cuda:0"),)))
        found = got.result()
    assert found is not None and {str(tensor.device) for tensor in found.tensors.values()} == {"cuda:1"}
    assert checksums(found) == checksums(weights("cpu"))


def test_every_bit_arrives_in_another_process_on_the_same_gpu() -> None:
    sender = CudaIpc(bucket_mib=3, timeout=60)
    context = multiprocessing.get_context("spawn")
    found = context.SimpleQueue()
    for _ in range(2):
        offers = [sender.offer(iter(()), 1, "127.0.0.1")]
        engine = context.Process(target=report, args=(offers, found))
        engine.start()
        sender.send(iter((weights("cuda"),)))
        engine.join()
        assert found.get() == ({"cuda:0"}, checksums(weights("cpu")))


def report(offers: Sequence[IpcOffer], found: Any) -> None:
    got = joined(list(CudaIpc(bucket_mib=3, timeout=60).receive(offers, 1)))
    assert got is not None
    found.put(({str(tensor.device) for tensor in got.tensors.values()}, checksums(got)))
