"""Select rollouts of a batch, in any order and truncated, for permutations, micro-batches and smaller inputs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, TypeVar, cast

import torch
from torch import Tensor

from rlsdk.batch import CreditInputs, LossInputs
from rlsdk.fields import names

X = TypeVar("X", bound=CreditInputs | LossInputs)
_LABELS = ("groups", "sources", "trajectories", "states", "pairs")
"""Dense indices of rollouts, renumbered if rollouts are missing."""
PER_ROLLOUT = frozenset((*names("credit", axis="rollout"), *names("loss", axis="rollout")))


def lengths_of(x: CreditInputs | LossInputs) -> Tensor:
    """Return the number of tokens of each rollout, int64 `[n]`."""
    return x.lengths if isinstance(x, CreditInputs) else torch.bincount(x.segments, minlength=x.rollouts)


def places(x: CreditInputs | LossInputs, rows: Sequence[int], lengths: Sequence[int] | None = None) -> Tensor:
    """Return the positions of the tokens of the rollouts `rows`, in that order; the first `lengths` of each, or all."""
    full = lengths_of(x)
    starts = full.cumsum(0) - full
    wanted = full[list(rows)].tolist() if lengths is None else lengths
    spans = [torch.arange(int(starts[row]), int(starts[row]) + n) for row, n in zip(rows, wanted, strict=True)]
    return torch.cat([*spans, torch.zeros(0, dtype=torch.int64)]).long()


def select(x: X, rows: Sequence[int], lengths: Sequence[int] | None = None) -> X:
    """Return the rollouts `rows` as a batch, in that order; the first `lengths` tokens of each, or all."""
    tokens, index = places(x, rows, lengths), torch.tensor(rows, dtype=torch.int64)
    fields: dict[str, Any] = dict(x.clock)
    for name, value in vars(x).items():
        if isinstance(value, dict):
            fields[name] = {key: part[index] for key, part in value.items()}
        elif isinstance(value, Tensor) and name not in ("segments", "lengths"):
            part = value[index] if name in PER_ROLLOUT else value[tokens]
            fields[name] = torch.unique(part, return_inverse=True)[1] if name in _LABELS else part
    kept = lengths_of(x)[index] if lengths is None else torch.tensor(lengths, dtype=torch.int64)
    extra = {name: fields.pop(name) for name in x.extra}
    if isinstance(x, CreditInputs):
        return type(x)(**fields, lengths=kept).with_extra(**extra)
    segments = torch.repeat_interleave(torch.arange(len(rows)), kept)
    return type(x)(**fields, segments=segments, rows=len(rows)).with_extra(**extra)


def units(x: CreditInputs | LossInputs) -> list[list[int]]:
    """Return rows that must not be split: pairs if there are any, otherwise single rollouts."""
    count = len(lengths_of(x))
    if not hasattr(x, "pairs"):
        return [[row] for row in range(count)]
    return [torch.nonzero(x.pairs == pair)[:, 0].tolist() for pair in x.pairs.unique()]


def smaller(x: X) -> Iterator[X]:
    """Yield the batch without one of its units, or with one rollout shortened by a token."""
    held = units(x)
    for left_out in range(len(held) if len(held) > 1 else 0):
        yield select(x, [row for i, unit in enumerate(held) if i != left_out for row in unit])
    lengths = lengths_of(x).tolist()
    for row, length in enumerate(lengths):
        if length > 1:
            yield select(x, range(len(lengths)), [length - 1 if i == row else n for i, n in enumerate(lengths)])


def to_dtype(x: X, dtype: torch.dtype) -> X:
    """Convert all floats of the batch to `dtype`."""
    changed: dict[str, Any] = {}
    changed |= {k: v.to(dtype) for k, v in vars(x).items() if isinstance(v, Tensor) and v.is_floating_point()}
    parts = vars(x).get("reward_parts")
    if parts is not None:
        changed["reward_parts"] = {name: part.to(dtype) for name, part in parts.items()}
    return cast("X", x.replace(**changed))


def copied(x: X) -> X:
    """Return the batch with copied tensors, so that in-place changes by a component have no effect elsewhere."""
    changed = {k: v.clone() for k, v in vars(x).items() if isinstance(v, Tensor) and not v.requires_grad}
    return cast("X", x.replace(**changed))
