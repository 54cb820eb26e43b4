"""Copy weights from one engine to another in the form in which both hold them, without the learner."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from rlsdk.contracts import Weights
from rlsdk.weights import from_weights, to_weights

if TYPE_CHECKING:
    from torch import Tensor


def layout_of(tensors: Mapping[str, Tensor]) -> str:
    """Return a digest of the names, dtypes and shapes of tensors; empty if there are none."""
    rows = [(name, str(tensor.dtype), list(tensor.shape)) for name, tensor in sorted(tensors.items())]
    return hashlib.sha256(json.dumps(rows).encode()).hexdigest() if rows else ""


def held_parts(version: int, tensors: Mapping[str, Tensor]) -> Iterator[Weights]:
    """Yield each tensor as a part of the weights, without a copy; names that share a tensor share a part."""
    names: dict[tuple[int, int], list[str]] = {}
    for name, tensor in tensors.items():
        names.setdefault((tensor.data_ptr(), tensor.nbytes), []).append(name)
    for group in names.values():
        yield to_weights(version, {name: tensors[name] for name in group}, copy=False, host=False)


def copy_parts(tensors: Mapping[str, Tensor], parts: Iterator[Weights]) -> None:
    """Overwrite tensors with the parts that `held_parts` yields for tensors of the same layout."""
    import torch

    with torch.inference_mode():
        for part in parts:
            for name, tensor in from_weights(part):
                tensors[name].copy_(tensor)
