"""The shared-memory transfer: memory in use by a loader is not overwritten, and other users are turned away."""

from __future__ import annotations

import errno
import mmap
import multiprocessing
import os
import socket
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import attrs
import numpy as np
import pytest

from rlsdk.contracts import Weights
from rlsdk.errors import TransferError
from rlsdk.transfers.shared_memory import SharedMemory, SharedOffer

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


def test_a_transfer_after_one_that_found_no_memory_for_a_region_sends_what_it_writes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sender, receiver = SharedMemory(bucket_mib=3), SharedMemory(bucket_mib=3)
    mapped = mmap.mmap

    def full(file: int, size: int, offset: int) -> mmap.mmap:
        if offset:  # of any region but the first
            raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))
        return mapped(file, size, offset=offset)

    with monkeypatch.context() as patch:
        patch.setattr(mmap, "mmap", full)
        with pytest.raises(TransferError, match="the other side left"):
            carried(sender, receiver)
    carried(sender, receiver)


def test_an_engine_that_gets_weights_from_another_sender_lets_go_of_the_memory_of_the_last_one() -> None:
    receiver, former = SharedMemory(bucket_mib=3), SharedMemory(bucket_mib=3)
    carried(former, receiver)
    carried(SharedMemory(bucket_mib=3), receiver)
    memory = os.fstat(former._file).st_ino
    numbers = [int(each) for each in os.listdir("/proc/self/fd")]
    opened = [each for each in numbers if os.path.exists(f"/proc/self/fd/{each}") and os.fstat(each).st_ino == memory]
    assert len(opened) == 1 + len(former._regions)  # the sender's own: each mapped region has one, too


def test_an_engine_of_another_node_or_of_a_learner_that_is_gone_says_so() -> None:
    offer = SharedMemory(timeout=1).offer(iter(()), 1, "127.0.0.1")
    with pytest.raises(TransferError, match="not on the node of the learner's rank 0; use weight_transfer=gloo"):
        next(SharedMemory().receive(attrs.evolve(offer, boot="another"), 1))
    with pytest.raises(TransferError, match="the learner's memory /proc/1/fd/9999 cannot be opened"):
        next(SharedMemory().receive(attrs.evolve(offer, path="/proc/1/fd/9999"), 1))


def test_an_offer_is_sent_once_and_whoever_does_not_come_or_is_gone_is_named() -> None:
    sender = SharedMemory(timeout=0.1)
    old, _ = (sender.offer(iter(()), 2, "127.0.0.1") for _ in range(2))
    with pytest.raises(TransferError, match=r"the learner cannot be reached: .*refused"):  # by a newer offer
        next(SharedMemory().receive(old, 1))
    with pytest.raises(TransferError, match="2 engines and the learner did not meet: timed out"):
        sender.send(layers())
    with pytest.raises(TransferError, match="there is no open offer"):
        sender.send(layers())


def receives_and_stays(offer: SharedOffer) -> None:
    for _ in SharedMemory(bucket_mib=3).receive(offer, 1):
        pass
    time.sleep(60)


def test_an_engine_that_dies_before_it_connects_ends_the_transfer_and_the_next_one_does_not_wait_for_it() -> None:
    sender = SharedMemory(bucket_mib=3)
    offer = sender.offer(iter(()), 1, "127.0.0.1")
    engine = multiprocessing.get_context("fork").Process(target=receives_and_stays, args=(offer,))
    engine.start()
    sender.send(layers())
    sender.offer(iter(()), 1, "127.0.0.1")
    engine.kill()
    began = time.monotonic()
    with pytest.raises(TransferError, match="1 engine and the learner did not meet: the process of an engine has end"):
        sender.send(layers())
    assert time.monotonic() - began < 10
    engine.join()
    carried(sender, SharedMemory(bucket_mib=3))


def receives_as_another_user(address: str, connected: Any) -> None:
    os.setuid(65534)
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as learner:
        learner.connect(f"\0{address}")
        connected.set()
        sys.exit(len(learner.recv(99)))


@pytest.mark.skipif(os.getuid() != 0, reason="only root can act as another user")
def test_a_process_of_another_user_gets_nothing() -> None:
    sender, context = SharedMemory(bucket_mib=3), multiprocessing.get_context("spawn")
    offer, connected = sender.offer(iter(()), 1, "127.0.0.1"), context.Event()
    stranger = context.Process(target=receives_as_another_user, args=(offer.address, connected))
    stranger.start()
    assert connected.wait(60)  # it comes first
    with ThreadPoolExecutor(1) as pool:
        sent = pool.submit(sender.send, layers())
        assert sum(len(part.tensors) for part in SharedMemory(bucket_mib=3).receive(offer, 1)) == LAYERS
        sent.result()
    stranger.join()
    assert stranger.exitcode == 0
