"""Large zeroed memory that costs nothing until it is used."""

from __future__ import annotations

import mmap
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

LARGE = 64 * 2**20
"""Bytes from which on memory is left to be zeroed when it is first touched."""


class LazyZeros(TorchFunctionMode):
    """In the block, `torch.zeros` of many bytes on the CPU maps memory, which the system zeroes page by page.

    torch writes the zeros itself: for the KV cache of an engine that takes a second for each GiB, at every start, and
    a run may use but a part of it.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Map the memory of a large vector of bytes; leave all other calls as they are."""
        kwargs = kwargs or {}
        if func is torch.zeros and kwargs.keys() == {"dtype", "device"} and kwargs["dtype"] is torch.int8:
            (size, *more), device = args, torch.device(kwargs["device"])
            if not more and isinstance(size, int) and size >= LARGE and device.type == "cpu":
                # Private memory, as malloc gives; the tensor keeps it.
                pages = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
                return torch.frombuffer(pages, dtype=torch.int8)
        return func(*args, **kwargs)
