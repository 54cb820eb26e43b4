"""Large zeroed buffers that take time and memory only when they are used."""

from __future__ import annotations

import mmap
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

LARGE = 64 * 2**20
"""Bytes from which on memory is left to be zeroed when it is first touched."""


class LazyZeros(TorchFunctionMode):
    """Within the block, `torch.zeros` of many bytes on the CPU maps memory, which the system zeroes page by page.

    torch writes zeros itself, which takes a second per GiB of an engine's KV cache at every start, although a run may
    use only part of it.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Map the memory of a large byte vector; pass all other calls through."""
        kwargs = kwargs or {}
        if func is torch.zeros and kwargs.keys() == {"dtype", "device"} and kwargs["dtype"] is torch.int8:
            (size, *more), device = args, torch.device(kwargs["device"])
            if not more and isinstance(size, int) and size >= LARGE and device.type == "cpu":
                # Private memory, like malloc's; the tensor keeps it alive.
                pages = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
                return torch.frombuffer(pages, dtype=torch.int8)
        return func(*args, **kwargs)
