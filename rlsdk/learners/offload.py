"""Move tensors that a learner does not need for a while from its GPU to host memory, and back."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


class OffloadedTensors:
    """Tensors in host memory whose device memory is free.

    They can be read meanwhile, for example for a checkpoint. Views of them cannot be read; after `restore`, the tensors
    have their old storage again, so views are valid again as well.
    """

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        """Copy tensors to host memory and free their storage.

        Args:
            tensors: Tensors on one device. Those that share their storage with others, or are in a mapped file, stay
                where they are.
        """
        self._held: list[tuple[Tensor, Tensor, int]] = []
        for tensor in tensors:
            storage = tensor.untyped_storage()
            size = storage.nbytes()
            if not size or tensor.numel() * tensor.element_size() != size or not storage.resizable():
                continue
            on_device = tensor.detach()  # shares the storage, and keeps it
            tensor.data = tensor.detach().to("cpu", copy=True)
            storage.resize_(0)
            self._held.append((tensor, on_device, size))

    @property
    def nbytes(self) -> int:
        """Bytes of device memory that are free."""
        return sum(size for _, _, size in self._held)

    def restore(self) -> None:
        """Copy the tensors back into their storage."""
        while self._held:
            tensor, on_device, size = self._held.pop()
            on_device.untyped_storage().resize_(size)
            on_device.copy_(tensor.detach())
            tensor.data = on_device
