"""Tensors that leave their device for host memory, and return."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode

from rlsdk.learners.trained import OffloadedTensors


def test_offloaded_tensors_can_be_read_and_return_to_their_storage() -> None:
    parameter = torch.nn.Parameter(torch.randn(10))
    view, before = parameter.detach()[2:5], parameter.detach().clone()
    count = torch.tensor(3.0)
    offloaded = OffloadedTensors([parameter, count, torch.empty(0)])
    assert offloaded.nbytes == 44 and view.untyped_storage().nbytes() == 0
    assert torch.equal(parameter, before) and count == 3
    offloaded.restore()
    assert offloaded.nbytes == 0
    assert torch.equal(parameter, before) and torch.equal(view, before[2:5])
    parameter.data[2] = 7
    assert view[0] == 7 and count == 3


def test_tensors_that_share_their_storage_stay() -> None:
    whole = torch.randn(20)
    part = whole[:10]
    assert OffloadedTensors([part]).nbytes == 0
    assert part.data_ptr() == whole.data_ptr()


def test_zeros_take_no_host_memory_and_return_as_zeros() -> None:
    def held() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    zeros = torch.nn.Parameter(torch.zeros(2**14, 2**12, dtype=torch.bfloat16))
    view, before = zeros.detach()[3:], held()
    offloaded = OffloadedTensors([zeros])
    assert offloaded.nbytes == 2**27
    assert held() < before - 2**26  # the parameter's memory is free, and no other is used
    assert (zeros.shape, zeros.dtype, zeros.is_contiguous()) == ((2**14, 2**12), torch.bfloat16, True)
    assert not zeros.any()
    offloaded.restore()
    assert not zeros.any() and view.data_ptr() == zeros[3].data_ptr()


class PinsMemory(TorchFunctionMode):
    """As torch for GPUs does, gives pinned memory, here pageable, up to a limit in bytes; counts it."""

    def __init__(self, limit: int) -> None:
        self.limit, self.pinned = limit, 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = dict(kwargs or {})
        pins = func is torch.empty and given.pop("pin_memory", False)
        made = func(*args, **given)
        if pins:
            if made.nbytes > self.limit:
                raise torch.AcceleratorError("CUDA error: out of memory")
            self.pinned += made.nbytes
        return made


@pytest.mark.parametrize(("limit", "pinned"), [(10**6, 48), (39, 8)])
def test_copies_for_a_gpu_are_pinned_as_far_as_memory_can_be_locked(
    limit: int, pinned: int, caplog: pytest.LogCaptureFixture
) -> None:
    parameters = [torch.nn.Parameter(torch.randn(10)), torch.randn(4, dtype=torch.bfloat16), torch.zeros(7)]
    before = [each.detach().clone() for each in parameters]
    with PinsMemory(limit) as gpu:
        offloaded = OffloadedTensors(parameters, pinned=True)
    assert gpu.pinned == pinned
    assert all(map(torch.equal, parameters, before))
    offloaded.restore()
    assert all(map(torch.equal, parameters, before))
    assert ("40 bytes of host memory cannot be pinned (CUDA error: out of memory)" in caplog.text) == (limit == 39)
