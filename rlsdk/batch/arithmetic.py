"""Sums by index, whitening, bounded log-ratios, planes `[n, L]` and the packed axis `[t]`; the base of both inputs."""

from __future__ import annotations

import copy
import functools
from collections.abc import Iterable
from typing import Any, ClassVar, Self

import attrs
import numpy as np
import torch
from torch import Tensor

from rlsdk.errors import MissingFieldError, ValueFault, nearest
from rlsdk.fields import names

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
    """Normalise to mean 0 and unbiased variance 1: `(v - mean) / sqrt(var + 1e-8)` in float64; a single value gives 0.

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
        whitened: Normalise to mean 0 and variance 1 over the sampled tokens.
        clip: Maximum absolute value; None for no clipping.

    Returns:
        float `[t]`, 0 for tokens that were not sampled.
    """
    values = torch.where(loss_mask, wide(advantages), 0)
    if whitened:
        values = torch.zeros_like(values).masked_scatter(loss_mask, whiten(values[loss_mask]))
    return values if clip is None else values.clamp(-clip, clip)


def of_top_entropy(entropy: Tensor, loss_mask: Tensor, share: float) -> Tensor:
    """Return True for the sampled tokens whose entropy is in the top `share`, bool `[t]`; equal ones share their fate.

    Args:
        entropy: float `[t]`.
        loss_mask: bool `[t]`, True where the policy sampled the token.
        share: From 0, only the highest entropy, to 1, all tokens.
    """
    sampled = entropy[loss_mask].double().numpy(force=True)
    if not len(sampled):
        return loss_mask
    least = float(np.quantile(sampled, 1 - share))  # torch.quantile takes at most 16 million numbers
    return loss_mask & (entropy.double() >= least)


def optional() -> Any:
    """A field that may be absent."""
    return attrs.field(default=None, kw_only=True)


class Packed:
    """Base class of both inputs: absent optional fields, copies with changes, packing."""

    CLOCK: ClassVar[tuple[str, ...]]
    """Fields that track training progress: numbers, equal on all ranks and in all micro-batches of an update."""
    loss_mask: Tensor
    ALWAYS: ClassVar[frozenset[str]]
    """Optional fields that every component gets if they are present."""

    def __attrs_post_init__(self) -> None:
        for field in attrs.fields(type(self)):  # type: ignore[arg-type]
            if field.kw_only and not field.name.startswith("_") and getattr(self, field.name) is None:
                object.__delattr__(self, field.name)
        self._check()

    def _check(self) -> None:
        raise AssertionError  # every subclass checks its shapes

    def __getattr__(self, name: str) -> Any:
        if name in {f.name for f in attrs.fields(type(self))}:  # type: ignore[arg-type]
            raise MissingFieldError(
                f"{type(self).__name__}.{name} was not computed. A component that reads it must declare "
                f"needs=({name!r},); if you build the inputs yourself, pass {name}=…"
            )
        public = {kind: _public(kind) for kind in Packed.__subclasses__()}  # type: ignore[arg-type]
        others = [kind.__name__ for kind, held in public.items() if name in held]
        near = nearest(name, public.get(type(self), ()))
        hint = (
            "a component that reads a field of a plugin must list its function, the one marked "
            f"@rlsdk.field({name!r}), in needs=(…,)"
        )
        if name in names("credit"):
            hint = "to pass its values to a loss, declare a field of your own under another name (@rlsdk.field)"
        raise AttributeError(
            f"{type(self).__name__!r} object has no attribute {name!r}"
            + "".join(f"; {kind} has it" for kind in others)
            + (f"; did you mean {near}?" if near else "")
            + f"; {hint}"
        )

    def __repr__(self) -> str:
        held = {name.lstrip("_"): value for name, value in vars(self).items() if value is not None}
        shown = (f"{name}={list(v.shape) if isinstance(v, Tensor) else v}" for name, v in held.items())
        return f"{type(self).__name__}({', '.join(shown)})"

    @property
    def extra(self) -> dict[str, Tensor]:
        """Fields that plugins declared (`rlsdk.field`), by name."""
        known = _known(type(self))  # type: ignore[arg-type]  # a class is hashable
        return {name: value for name, value in vars(self).items() if name.lstrip("_") not in known}

    def with_extra(self, **fields: Tensor | None) -> Self:
        """Return a copy with fields that plugins declared, `[t]` each; None removes a field."""
        found = copy.copy(self)
        for name, value in fields.items():
            if value is None:
                vars(found).pop(name, None)
            else:
                object.__setattr__(found, name, value)
        found._expect("token", len(self.loss_mask), *fields)
        return found

    def _rebuilt(self, held: dict[str, Any]) -> Self:
        """Create a copy from attributes of this object."""
        extra = self.extra.keys()
        arguments = {name.lstrip("_"): value for name, value in held.items() if name not in extra}
        made = type(self)(**arguments)
        return made.with_extra(**{name: held[name] for name in extra if name in held}) if extra else made

    def replace(self, **changes: Any) -> Self:
        """Return a copy with some fields changed; None removes an optional field."""
        return self._rebuilt({**{k.lstrip("_"): v for k, v in vars(self).items()}, **changes})

    def only(self, needs: Iterable[str]) -> Self:
        """Return a copy with only the optional fields in `needs` and `ALWAYS`; reading another one raises an error."""
        keep = {*self.ALWAYS, *needs}
        fields = attrs.fields(type(self))  # type: ignore[arg-type]
        optional = [f.name for f in fields if f.kw_only and f.name[0] != "_"]
        return self.replace(**{name: None for name in (*optional, *self.extra) if name not in keep})

    @property
    def edits(self) -> dict[str, int]:
        """Number of in-place changes of each tensor so far, by name."""
        return {name.lstrip("_"): v._version for name, v in vars(self).items() if isinstance(v, Tensor)}

    @property
    def clock(self) -> dict[str, int]:
        """The fields of `CLOCK` by name."""
        return {name: getattr(self, name) for name in self.CLOCK}

    def to(self, device: torch.device | str) -> Self:
        """Return a copy with every tensor on `device`."""
        return self._rebuilt({k: v.to(device) if isinstance(v, Tensor) else v for k, v in vars(self).items()})

    def _expect(self, axis: str, size: int, *names: str) -> None:
        for name in names:
            value = vars(self).get(name)
            if isinstance(value, Tensor) and tuple(value.shape) != (size,):
                raise ValueFault(
                    f"{type(self).__name__}.{name} has shape {tuple(value.shape)}; expected ({size},), "
                    f"one value per {axis}"
                )


@functools.cache
def _known(kind: type) -> frozenset[str]:
    """Return the names of an input class's own fields."""
    return frozenset(field.name.lstrip("_") for field in attrs.fields(kind))


@functools.cache
def _public(kind: type) -> tuple[str, ...]:
    """Return the names that a component may read of an input class, in order."""
    return tuple(sorted({n for n in (*dir(kind), *(f.name for f in attrs.fields(kind))) if n[0] != "_"}))
