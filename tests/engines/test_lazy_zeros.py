"""Zeroed memory that the system provides on first use."""

from __future__ import annotations

import psutil
import torch

from rlsdk.engines.lazy_zeros import LARGE, LazyZeros


def test_large_memory_is_zero_and_writable_and_takes_nothing_until_it_is_used() -> None:
    size, before = 16 * LARGE, psutil.Process().memory_info().rss
    with LazyZeros():
        found = torch.zeros(size, dtype=torch.int8, device="cpu")
    assert found.shape == (size,)
    assert found.dtype == torch.int8
    assert psutil.Process().memory_info().rss - before < LARGE
    assert found.data_ptr() % 64 == 0  # as torch aligns it
    found.view(torch.float32)[-1] = 1.5
    assert found.view(torch.float32)[-2:].tolist() == [0.0, 1.5]
    assert not found[: 2 * LARGE].any()


def test_what_is_small_or_of_another_type_is_made_by_torch() -> None:
    with LazyZeros():
        assert torch.zeros(10, dtype=torch.int8, device="cpu").tolist() == [0] * 10
        assert torch.zeros(2, 3).shape == (2, 3)
        assert torch.zeros((LARGE, 1), dtype=torch.int8, device="meta").device.type == "meta"
        assert torch.zeros(LARGE, dtype=torch.int16, device="cpu").dtype == torch.int16
