"""Broadcasts with members that die, are late or leave: nobody waits longer than the timeout."""

from __future__ import annotations

import multiprocessing
import os
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch

from rlsdk.contracts import Weights
from rlsdk.errors import TransferError
from rlsdk.transfers.broadcast import Gloo, Nccl
from rlsdk.transfers.shared_memory import SharedMemory
from rlsdk.weights import checksums, joined
from tests.transfers.parts import mixed

LAYERS = 12


class NcclOnCPU(Nccl):
    """The transfer for GPUs with another backend and device, and all else as it is."""

    backend, device = "gloo", "cpu"


def layers() -> Iterator[Weights]:
    for index in range(LAYERS):
        yield Weights(5, {f"{index}.weight": np.full(2**18, index, np.float32)}, {f"{index}.weight": "float32"})


def received(kind: type[Gloo], offer: Any, seat: int, leave_after: int = LAYERS) -> int:
    count = 0
    for part in kind(bucket_mib=2, timeout=20).receive(offer, seat):
        for name, array in part.tensors.items():
            assert (array == int(name.split(".")[0])).all()
            count += 1
        if count > leave_after:
            os._exit(1)
    return count


def test_buckets_are_loaded_while_others_come_and_two_buffers_do() -> None:
    sender, receiver = Gloo(bucket_mib=4), Gloo(bucket_mib=4)
    offer = sender.offer(iter(()), 1, "127.0.0.1")
    with ThreadPoolExecutor(1) as pool:
        sent = pool.submit(sender.send, layers())
        assert sum(1 for _ in receiver.receive(offer, 1)) == LAYERS // 2
        sent.result()
    sizes = [buffer.nbytes for buffer in receiver._buffers.held]
    # A thread of gloo's may refer to one for a moment after it was received.
    assert sizes in ([2**21] * 2, [2**21] * 3)


def test_tensors_of_a_device_keep_their_bits_and_are_not_overwritten_while_they_are_held() -> None:
    tied = torch.randn(7, 300).bfloat16()
    parts = mixed(tied)
    assert parts[0].tensors["embeddings"].data_ptr() == tied.data_ptr()  # the learner's own, and no copy
    sender = NcclOnCPU(bucket_mib=1)
    offer = sender.offer(iter(()), 1, "127.0.0.1")
    with ThreadPoolExecutor(1) as pool:
        sent = pool.submit(sender.send, iter(parts))
        got = list(NcclOnCPU(bucket_mib=1).receive(offer, 1))
        sent.result()
    found, expected = joined(got), joined(parts)
    assert len(got) == 3 and found is not None and expected is not None
    assert all(isinstance(tensor, torch.Tensor) for tensor in found.tensors.values())
    assert found.tensors["embeddings"] is found.tensors["head"]
    assert {name: (t.dtype, t.shape) for name, t in found.tensors.items()} == {
        name: (t.dtype, t.shape) for name, t in expected.tensors.items()
    }
    assert found.dtypes == expected.dtypes and checksums(found) == checksums(expected)


@pytest.mark.parametrize("kind", [Gloo, NcclOnCPU, SharedMemory])
def test_an_engine_that_is_killed_in_the_middle_ends_the_transfer_for_all_at_once(kind: type[Gloo]) -> None:
    sender = kind(bucket_mib=2, timeout=60)
    offer = sender.offer(iter(()), 2, "127.0.0.1")
    mortal = multiprocessing.get_context("spawn").Process(target=received, args=(kind, offer, 2, 3))
    mortal.start()
    with ThreadPoolExecutor(1) as pool:
        other = pool.submit(received, kind, offer, 1)
        with pytest.raises(TransferError, match="weights of version 5 were not sent to all engines: "):
            sender.send(layers())
        ended = time.monotonic()
        with pytest.raises(TransferError):
            other.result()
        assert time.monotonic() - ended < 10  # the connections were closed: nobody waits for the limit
    mortal.join()
    assert mortal.exitcode == 1
    offer = sender.offer(iter(()), 1, "127.0.0.1")  # the next transfer is not affected
    with ThreadPoolExecutor(1) as pool:
        other = pool.submit(received, kind, offer, 1)
        sender.send(layers())
        assert other.result() == LAYERS


def test_an_engine_that_does_not_come_is_waited_for_as_long_as_was_agreed() -> None:
    sender = Gloo(timeout=1)
    offer = sender.offer(iter(()), 2, "127.0.0.1")
    with ThreadPoolExecutor(1) as pool:
        other = pool.submit(lambda: list(Gloo(timeout=1).receive(offer, 1)))
        with pytest.raises(TransferError, match=r"2 engines and the learner did not meet at 127\.0\.0\.1:"):
            sender.send(layers())
        with pytest.raises(TransferError):
            other.result()


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_nccl_without_a_gpu_fails_as_any_transfer_does() -> None:
    sender = Nccl(timeout=5)
    offer = sender.offer(iter(()), 1, "127.0.0.1")
    with ThreadPoolExecutor(1) as pool:
        other = pool.submit(lambda: list(Nccl(timeout=5).receive(offer, 1)))
        with pytest.raises(TransferError, match="NCCL needs a GPU in this process"):
            sender.send(layers())
        with pytest.raises(TransferError) as ended:
            other.result()
    assert "\n" not in str(ended.value)  # torch adds its stack


def test_an_offer_is_sent_once_and_a_learner_that_is_gone_is_named() -> None:
    sender = Gloo(timeout=1)
    offer = sender.offer(iter(()), 1, "127.0.0.1")
    with pytest.raises(TransferError, match="did not meet"):
        sender.send(layers())
    with pytest.raises(TransferError, match="there is no open offer"):
        sender.send(layers())
    with pytest.raises(TransferError, match=rf"the learner at 127\.0\.0\.1:{offer.port} cannot be reached"):
        next(Gloo(timeout=1).receive(offer, 1))
