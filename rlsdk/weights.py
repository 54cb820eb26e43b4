"""Convert weights between torch and numpy for the transfer from learner to engines; Ray shares numpy without copies.

numpy has no bfloat16: such a tensor is sent as uint16 with the same bits, and `Weights.dtypes` records its dtype.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, overload

from rlsdk.contracts import DType, Weights
from rlsdk.errors import ValueFault

if TYPE_CHECKING:
    import numpy as np
    import torch

__all__ = [
    "TIED_HEAD",
    "as_bytes",
    "checksums",
    "from_weights",
    "joined",
    "on_host",
    "pack",
    "to_weights",
    "unpack",
]
TIED_HEAD = "lm_head.weight"
"""Transformers' name of the output head; if it is tied to the input embeddings, one tensor has two names."""


def to_weights(
    version: int,
    named_tensors: Mapping[str, torch.Tensor] | Iterable[tuple[str, torch.Tensor]],
    *,
    dtype: DType | None = None,
    copy: bool = True,
    host: bool = True,
) -> Weights:
    """Convert tensors to numpy arrays.

    Args:
        version: Number of trainer steps done when these weights are published.
        named_tensors: name -> tensor of any shape, on any device; bfloat16 or a dtype that numpy has.
        dtype: Dtype of floating-point arrays in the result; by default, each tensor keeps its own.
        copy: True if the arrays must own their memory; otherwise, arrays of CPU tensors change with the model.
        host: False to keep torch tensors on their device, without a copy.

    Returns:
        The weights. Names that share a tensor (tied embeddings) share an array, which Ray then sends once.

    Raises:
        ValueFault: A name occurs twice.
    """
    from torch.multiprocessing.reductions import StorageWeakRef

    arrays: dict[str, np.ndarray | torch.Tensor] = {}
    dtypes: dict[str, str] = {}
    seen: dict[tuple[Any, ...], np.ndarray | torch.Tensor] = {}
    for name, tensor in named_tensors.items() if isinstance(named_tensors, Mapping) else named_tensors:
        if name in arrays:
            raise ValueFault(f"weights of version {version}: tensor {name!r} is given twice; each name must occur once")
        # Not the address alone, which may have belonged to an earlier tensor that the iterator made and dropped.
        storage = StorageWeakRef(tensor.untyped_storage())  # type: ignore[no-untyped-call]
        key = (storage, tensor.storage_offset(), tuple(tensor.shape), tensor.stride(), tensor.dtype)
        shared = seen.get(key) if tensor.numel() else None
        if shared is None:
            shared = pack(tensor, dtype=dtype, copy=copy) if host else _cast(tensor, dtype)
        arrays[name] = seen[key] = shared
        dtypes[name] = (
            dtype if dtype is not None and tensor.is_floating_point() else str(tensor.dtype).removeprefix("torch.")
        )
    return Weights(version, arrays, dtypes)


def from_weights(weights: Weights) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors; those of arrays share their memory: read or copy them, never write to them."""
    import numpy as np

    for name, array in weights.tensors.items():
        yield name, unpack(array, weights.dtypes[name]) if isinstance(array, np.ndarray) else array


def on_host(weights: Weights, *, copy: bool = False) -> Weights:
    """Return weights as numpy arrays.

    Args:
        weights: Arrays, or tensors on any device.
        copy: True if the arrays must own their memory.
    """
    import numpy as np

    arrays = {
        name: (array.copy() if copy else array) if isinstance(array, np.ndarray) else pack(array, copy=copy)
        for name, array in weights.tensors.items()
    }
    return Weights(weights.version, arrays, weights.dtypes, weights.adapter)


def joined(parts: Iterable[Weights | None], *, copy: bool = False) -> Weights | None:
    """Join parts of the weights of one version; None if there are none.

    Args:
        parts: Parts; None is skipped. A single part is returned as is, unless `copy` is set.
        copy: True if the arrays of a part change when the next one is requested; the result then holds numpy arrays.
    """
    found: Weights | None = None
    for given in parts:
        if given is not None:
            part = on_host(given, copy=True) if copy else given
            if found is not None:
                tensors, dtypes = {**found.tensors, **part.tensors}, {**found.dtypes, **part.dtypes}
                part = Weights(part.version, tensors, dtypes, part.adapter)
            found = part
    return found


def checksums(weights: Weights) -> dict[str, str]:
    """Return the CRC-32 of each tensor's bytes, by name, as eight hex digits; a canary prints them for both sides."""
    import numpy as np

    arrays = {name: a if isinstance(a, np.ndarray) else pack(a, copy=False) for name, a in weights.tensors.items()}
    return {name: f"{zlib.crc32(as_bytes(array).data):08x}" for name, array in arrays.items()}


@overload
def as_bytes(values: np.ndarray) -> np.ndarray: ...


@overload
def as_bytes(values: torch.Tensor) -> torch.Tensor: ...


def as_bytes(values: np.ndarray | torch.Tensor) -> np.ndarray | torch.Tensor:
    """Return the bytes of an array or tensor, uint8 `[n]`, without copying contiguous ones."""
    import numpy as np

    if isinstance(values, np.ndarray):
        return np.ascontiguousarray(values).reshape(-1).view(np.uint8)
    import torch

    return values.contiguous().reshape(-1).view(torch.uint8)


def pack(tensor: torch.Tensor, *, dtype: DType | None = None, copy: bool = True) -> np.ndarray:
    """Return a tensor as a contiguous array of its shape; bfloat16 becomes uint16 with the same bits."""
    import torch

    here = _cast(tensor, dtype).cpu().contiguous()
    if copy and here.data_ptr() == tensor.data_ptr():
        here = here.clone()
    array: np.ndarray = (here.view(torch.uint16) if here.dtype == torch.bfloat16 else here).numpy()
    return array


def _cast(tensor: torch.Tensor, dtype: DType | None) -> torch.Tensor:
    import torch

    values = tensor.detach()
    return values if dtype is None or not values.is_floating_point() else values.to(getattr(torch, dtype))


def unpack(array: np.ndarray, dtype: str) -> torch.Tensor:
    """Return the tensor of a packed array, sharing its memory: never write to it. `dtype` is torch's name."""
    import numpy as np
    import torch

    if not array.flags.writeable:
        # torch warns about read-only memory, which Ray provides; an array created from its address avoids the warning.
        array = np.asarray(_Address(array))
    tensor = torch.from_numpy(array)
    return tensor.view(torch.bfloat16) if dtype == "bfloat16" else tensor


class _Address:
    """An array's memory, declared writable; holds the array, so that the memory outlives every array made from it."""

    def __init__(self, array: np.ndarray) -> None:
        interface = dict(array.__array_interface__)
        interface["data"] = (interface["data"][0], False)
        self.__array_interface__ = interface
        self._array = array
