"""Buckets: their tensors, their headers, and the memory that receives them."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from rlsdk.contracts import Weights
from rlsdk.transfers.buckets import ALIGNMENT, Buffers, Header, announced, filled
from rlsdk.weights import checksums, joined


def part(name: str, count: int, version: int = 7) -> Weights:
    return Weights(version, {name: np.arange(count, dtype=np.float32)}, {name: "float32"})


def test_parts_fill_a_bucket_up_to_its_size_in_their_order() -> None:
    parts = [part("a", 16), None, part("b", 16), part("c", 1), part("large", 1000), part("d", 16)]
    assert [list(bucket.tensors) for bucket in filled(parts, 128)] == [["a", "b"], ["c"], ["large"], ["d"]]
    assert list(filled([None, None], 128)) == []


def test_parts_are_read_when_their_bucket_is_wanted_and_not_before() -> None:
    read = []

    def parts() -> Iterator[Weights]:
        for name in "abcdef":
            read.append(name)
            yield part(name, 16)

    buckets = filled(parts(), 128)
    assert list(next(buckets).tensors) == ["a", "b"]
    assert read == ["a", "b", "c"]


def test_a_header_says_where_each_tensor_lies_and_tied_ones_lie_there_once() -> None:
    tied = np.arange(6, dtype=np.uint16).reshape(2, 3)
    sent = Weights(
        2,
        {"head": tied, "embeddings": tied, "scale": np.array(0.5), "turned": np.arange(6.0).reshape(2, 3).T},
        {"head": "bfloat16", "embeddings": "bfloat16", "scale": "float64", "turned": "float64"},
    )
    header, contents = announced(sent)
    assert header == Header.load(header.dump())
    assert [slot.begin % ALIGNMENT for slot in header.slots] == [0, 0, 0]
    assert [slot.size for slot in header.slots] == [12, 8, 48] == [len(content) for content in contents]
    buffer = np.full(header.size + 5, 255, np.uint8)
    for target, content in zip(header.contents(buffer), contents, strict=True):
        target[:] = content
    got = header.weights(buffer)
    assert got.version == 2 and got.dtypes == sent.dtypes and checksums(got) == checksums(sent)
    assert got.tensors["scale"].shape == () and got.tensors["turned"].shape == (3, 2)
    assert Header(4).size == 0 and Header.load(Header(4).dump()) == Header(4)


def test_a_buffer_is_used_again_once_nothing_refers_to_what_was_in_it() -> None:
    buffers = Buffers(128)
    first = buffers.take(100)
    held = first[:8].view(np.float32)  # as a loader holds a tensor of a layer that is not complete
    first = buffers.take(100)
    assert len(buffers.held) == 2 and not np.shares_memory(first, held)
    del first, held
    for _ in range(5):
        buffers.take(128)[:] = 1
    assert len(buffers.held) == 2
    large = buffers.take(129)  # in place of two that are idle and too small
    assert large.nbytes == 129 and len(buffers.held) == 1
    assert buffers.take(100).nbytes == 128 and len(buffers.held) == 2
    del large
    assert buffers.take(129).nbytes == 129 and len(buffers.held) == 2


def test_joined_parts_share_memory_unless_they_are_to_be_copied() -> None:
    parts = [part("a", 4), part("b", 4)]
    shared, copied = joined(parts), joined(parts, copy=True)
    assert shared is not None and copied is not None and joined([None]) is None
    assert np.shares_memory(shared.tensors["b"], parts[1].tensors["b"])
    assert not np.shares_memory(copied.tensors["b"], parts[1].tensors["b"])
    assert list(shared.tensors) == list(copied.tensors) == ["a", "b"] and joined(parts[:1]) is parts[0]
