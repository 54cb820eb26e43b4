"""The shared-memory transfer: memory in use by a loader is not overwritten, and none remains at the end."""

from __future__ import annotations

import mmap
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import attrs
import numpy as np
import pytest

from rlsdk.contracts import Weights
from rlsdk.errors import TransferError
from rlsdk.transfers.shared_memory import SharedMemory

LAYERS = 12


def layers() -> Iterator[Weights]:
    for index in range(LAYERS):
        yield Weights(5, {f"{index}": np.full(2**18, index, np.float32)}, {f"{index}": "float32"})


def carried(sender: SharedMemory, receiver: SharedMemory, hold: int | None = None) -> None:
    """Send all layers, and hold one of them to the end, as vLLM does with a layer that is not complete."""
    offer = sender.offer(iter(()), 1, "127.0.0.1")
    with ThreadPoolExecutor(1) as pool:
        sent = pool.submit(sender.send, layers())
        count, held = 0, None
        for part in receiver.receive(offer, 1):
            for name, array in part.tensors.items():
                assert (array == int(name)).all()
                held = array if int(name) == hold else held
                count += 1
            del array
        sent.result()
    assert count == LAYERS
    assert hold is None or (held is not None and (held == hold).all())


def test_three_regions_serve_in_turn_and_again_at_the_next_transfer() -> None:
    sender, receiver = SharedMemory(bucket_mib=3), SharedMemory(bucket_mib=3)
    carried(sender, receiver)
    carried(sender, receiver)
    assert [region.nbytes for region in sender._regions] == [2**20 + mmap.PAGESIZE] * 3


def test_what_a_loader_holds_is_not_written_over_while_others_are() -> None:
    sender, receiver = SharedMemory(bucket_mib=3), SharedMemory(bucket_mib=3)
    carried(sender, receiver, hold=0)
    assert len(sender._regions) == 4
    carried(sender, receiver)
    carried(sender, SharedMemory(bucket_mib=3))  # one that has started later
    assert len(sender._regions) == 4


def test_a_larger_bucket_gets_a_region_of_its_size() -> None:
    sender, receiver = SharedMemory(bucket_mib=1), SharedMemory(bucket_mib=1)
    carried(sender, receiver)
    assert [region.nbytes for region in sender._regions] == [2**20 + mmap.PAGESIZE] * 3


def test_an_engine_of_another_node_or_of_a_learner_that_is_gone_says_so() -> None:
    offer = SharedMemory(timeout=1).offer(iter(()), 1, "127.0.0.1")
    with pytest.raises(TransferError, match="not on the node of the learner's rank 0; use weight_transfer=gloo"):
        next(SharedMemory().receive(attrs.evolve(offer, boot="another"), 1))
    with pytest.raises(TransferError, match="the learner's memory /proc/1/fd/9999 cannot be opened"):
        next(SharedMemory().receive(attrs.evolve(offer, path="/proc/1/fd/9999"), 1))
