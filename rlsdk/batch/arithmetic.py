"""Sums by index, whitening, bounded log-ratios, and conversions between planes `[n, L]` and the packed axis `[t]`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

LOG_RATIO_BOUND = 20.0
WHITEN_EPSILON = 1e-8


def wide(values: Tensor) -> Tensor:
    """Return `values` in at least float32, since sums of ones in bfloat16 stop growing at 256."""
    return values.float() if values.dtype in (torch.bfloat16, torch.float16) else values


def size(index: Tensor) -> int:
    """Return the number of dense indices: the maximum plus one, or 0 for an empty tensor."""
    return int(index.max()) + 1 if len(index) else 0


def total(values: Tensor, index: Tensor, count: int) -> Tensor:
    """Return the sum of the values of each index, `[count]`, in at least float32."""
    values = wide(values)
    return torch.zeros(count, dtype=values.dtype, device=values.device).index_add(0, index, values)


def row_sums(values: Tensor, lengths: Tensor) -> Tensor:
    """Return the sum of each run of `lengths` values, `[n]`, in at least float32."""
    if not len(values):
        return wide(values).new_zeros(len(lengths))
    return torch.segment_reduce(wide(values), "sum", lengths=lengths)


def places(mask: Tensor, lengths: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return the token positions of a padded plane, bool `[n, L]`, and lengths (by default, up to the last True)."""
    positions = torch.arange(mask.shape[1], device=mask.device)
    if lengths is None:
        ends = torch.where(mask, positions + 1, 0)
        lengths = ends.amax(dim=1) if mask.shape[1] else ends.sum(dim=1)
    return positions < lengths[:, None], lengths


def pack(optional: dict[str, Any], inside: Tensor) -> dict[str, Any]:
    """Pack the fields that are padded planes `[n, L]`."""
    return {k: v[inside] if isinstance(v, Tensor) and v.dim() == 2 else v for k, v in optional.items()}


def pad(values_t: Tensor, lengths: Tensor, width: int | None) -> Tensor:
    """`[t]` -> `[n, L]`, zeros beyond each length."""
    width = (int(lengths.max()) if len(lengths) else 0) if width is None else width
    plane = values_t.new_zeros(len(lengths), width)
    plane[torch.arange(width, device=values_t.device) < lengths[:, None]] = values_t
    return plane


def bounded(log_ratio: Tensor) -> Tensor:
    """Clamp a log-ratio to ±20, so that its exponential is finite in float32."""
    return log_ratio.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)


def whiten(values: Tensor) -> Tensor:
    """Normalize to mean 0 and unbiased variance 1: `(v - mean) / sqrt(var + 1e-8)` in float64; a single value gives 0.

    Args:
        values: float `[s]`, sampled tokens only.
    """
    if not len(values):
        return values
    # Rounding may put the mean beyond all values; if all are equal, clamping makes it their value: they become 0.
    centred = values - values.mean(dtype=torch.float64).to(values.dtype).clamp(values.min(), values.max())
    variance = centred.square().sum(dtype=torch.float64) / max(len(values) - 1, 1)
    return centred.mul_(torch.rsqrt(variance + WHITEN_EPSILON).to(values.dtype))


def adjusted(advantages: Tensor, loss_mask: Tensor, *, whitened: bool = False, clip: float | None = None) -> Tensor:
    """Postprocess an algorithm's advantages: `whiten_advantages`, then `clip_advantages`.

    Args:
        advantages: float `[t]`.
        loss_mask: bool `[t]`, True where the policy sampled the token.
        whitened: Normalize to mean 0 and variance 1 over the sampled tokens.
        clip: Maximum absolute value; None for no clipping.

    Returns:
        float `[t]`, 0 for tokens that were not sampled.
    """
    values = torch.where(loss_mask, wide(advantages), 0)
    if whitened:
        values = torch.zeros_like(values).masked_scatter(loss_mask, whiten(values[loss_mask]))
    return values if clip is None else values.clamp(-clip, clip)
