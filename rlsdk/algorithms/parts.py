"""Computation on a batch in cache-sized parts: allocating memory costs more than the arithmetic on it."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from rlsdk.batch import CreditInputs
from rlsdk.batch.arithmetic import WHITEN_EPSILON
from rlsdk.fields import names

PART_TOKENS = 2**18
"""Approximate tokens per part, up to whole rollouts or groups: 1 MiB per float32 tensor."""
_PER_TOKEN = frozenset(names("credit", axis="token"))


def in_parts(
    estimate: Callable[[CreditInputs], tuple[Tensor, ...]], x: CreditInputs, *, together: Tensor | None = None
) -> tuple[Tensor, ...]:
    """Apply `estimate` to consecutive parts of whole rollouts and concatenate the results.

    Args:
        estimate: Returns tensors `[t]`; a rollout's values depend only on itself and the rollouts `together` with it.
        x: The batch.
        together: int64 `[n]`; rollouts with equal numbers share a part. If omitted, rollouts are independent.

    Returns:
        Tensors `[t]`.
    """
    cuts = _cuts(x, together)
    if len(cuts) < 2:
        return estimate(x)
    ends = x.lengths.cumsum(0)[torch.tensor(cuts, device=x.lengths.device) - 1].tolist()
    found: list[Tensor] = []
    row = token = 0
    for next_row, next_token in zip(cuts, ends, strict=True):
        here = slice(token, next_token)
        results = estimate(_part(x, slice(row, next_row), here))
        found = found or [result.new_empty(len(x.loss_mask)) for result in results]
        for whole, result in zip(found, results, strict=True):
            whole[here] = result
        row, token = next_row, next_token
    return tuple(found)


def whiten_sampled(values: Tensor, loss_mask: Tensor) -> Tensor:
    """Normalise sampled tokens to mean 0 and (unbiased) variance 1, in place, in float64; a single one becomes 0.

    Args:
        values: float `[t]`, zero where nothing was sampled.
        loss_mask: bool `[t]`, True where the policy sampled the token.

    Returns:
        `values`, still zero where nothing was sampled.
    """
    count = loss_mask.sum()
    if not count:
        return values
    everything = int(count) == len(values)
    sampled = values if everything else values[loss_mask]
    # Rounding may put the mean beyond all values; if all are equal, use exactly their value, so that they become 0.
    mean = (values.sum(dtype=torch.float64) / count).to(values.dtype).clamp(sampled.min(), sampled.max())
    squares = values.new_zeros((), dtype=torch.float64)
    for part, mask in zip(torch.split(values, PART_TOKENS), torch.split(loss_mask, PART_TOKENS), strict=True):
        part.sub_(mean)
        if not everything:
            part.mul_(mask)
        squares += part.square().sum(dtype=torch.float64)
    return values.mul_(torch.rsqrt(squares / (count - 1).clamp(min=1) + WHITEN_EPSILON).to(values.dtype))


def _cuts(x: CreditInputs, together: Tensor | None) -> list[int]:
    """Return the exclusive end of each part, in rollouts; the last is the number of rollouts."""
    rollouts = len(x.lengths)
    if len(x.loss_mask) <= PART_TOKENS:
        return [rollouts]
    may_end = torch.ones(rollouts, dtype=torch.bool, device=x.lengths.device)
    if together is not None:
        step = torch.diff(together)
        if bool((step < 0).any()):
            return [rollouts]
        may_end[:-1] = step > 0
    places = may_end.nonzero()[:, 0]
    number = x.lengths.cumsum(0)[places] // PART_TOKENS
    last = torch.diff(number, append=number[-1:] + 1) > 0
    return (places[last] + 1).tolist()


def _part(x: CreditInputs, rows: slice, tokens: slice) -> CreditInputs:
    changes = {
        name: value[tokens if name in _PER_TOKEN or name in x.extra else rows]
        for name, value in vars(x).items()
        if isinstance(value, Tensor)
    }
    return x.replace(**changes)
