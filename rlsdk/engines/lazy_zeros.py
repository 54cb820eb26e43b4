"""Large zeroed buffers that take time and memory only when they are used."""

from __future__ import annotations

import mmap
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

LARGE = 64 * 2**20
"""Minimum size in bytes of buffers that are zeroed only when they are first touched."""


class LazyZeros(TorchFunctionMode):
    """Make `torch.zeros` map large buffers on the CPU within the block; the system zeroes them page by page.

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
