"""Sums by index, and the way between planes `[n, L]` and the packed axis `[t]`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def wide(values: Tensor) -> Tensor:
    """`values` in at least float32: sums of many bfloat16 numbers stand still at 256."""
    return values.float() if values.dtype in (torch.bfloat16, torch.float16) else values


def size(index: Tensor) -> int:
    """Number of dense indices: the greatest plus one, 0 for an empty tensor."""
    return int(index.max()) + 1 if len(index) else 0


def total(values: Tensor, index: Tensor, count: int) -> Tensor:
    """Sum of the values of each index, `[count]`, in at least float32."""
    values = wide(values)
    return torch.zeros(count, dtype=values.dtype, device=values.device).index_add(0, index, values)


def row_sums(values: Tensor, lengths: Tensor) -> Tensor:
    """Sum of each run of `lengths` values, `[n]`, in at least float32."""
    if not len(values):
        return wide(values).new_zeros(len(lengths))
    return torch.segment_reduce(wide(values), "sum", lengths=lengths)


def places(mask: Tensor, lengths: Tensor | None) -> tuple[Tensor, Tensor]:
    """Which places of a plane hold tokens, bool `[n, L]`, and the lengths; left out, to the last True of each row."""
    positions = torch.arange(mask.shape[1], device=mask.device)
    if lengths is None:
        ends = torch.where(mask, positions + 1, 0)
        lengths = ends.amax(dim=1) if mask.shape[1] else ends.sum(dim=1)
    return positions < lengths[:, None], lengths


def pack(optional: dict[str, Any], inside: Tensor) -> dict[str, Any]:
    """Planes `[n, L]` among the fields, packed."""
    return {k: v[inside] if isinstance(v, Tensor) and v.dim() == 2 else v for k, v in optional.items()}


def pad(values_t: Tensor, lengths: Tensor, width: int | None) -> Tensor:
    """`[t]` -> `[n, L]`, zeros beyond each length."""
    width = (int(lengths.max()) if len(lengths) else 0) if width is None else width
    plane = values_t.new_zeros(len(lengths), width)
    plane[torch.arange(width, device=values_t.device) < lengths[:, None]] = values_t
    return plane
