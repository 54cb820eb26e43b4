"""What `CreditInputs` and `LossInputs` share: absent optional fields, copies with changes."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, ClassVar, Self

import attrs
import torch
from torch import Tensor

from rlsdk.errors import MissingFieldError, ValueFault


def optional() -> Any:
    """A field that may be absent."""
    return attrs.field(default=None, kw_only=True)


class Packed:
    """What both inputs share: absent optional fields, copies with changes, packing."""

    ALWAYS: ClassVar[frozenset[str]]
    """Optional fields that every component gets where there are any."""

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
                f"{type(self).__name__}.{name} was not computed. A component that reads it declares it, "
                f"needs=({name!r},); built by hand, give {name}=…"
            )
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    def __repr__(self) -> str:
        given = (f"{k.lstrip('_')}={_shape(v)}" for k, v in vars(self).items() if v is not None)
        return f"{type(self).__name__}({', '.join(given)})"

    def replace(self, **changes: Any) -> Self:
        """A copy with some fields changed; None takes an optional field away."""
        held = {k.lstrip("_"): v for k, v in vars(self).items()}
        return type(self)(**{**held, **changes})

    def only(self, needs: Iterable[str]) -> Self:
        """A copy with the optional fields `needs` and those of `ALWAYS`; reading another is an error that names it."""
        keep = {*self.ALWAYS, *needs}
        fields = attrs.fields(type(self))  # type: ignore[arg-type]
        return self.replace(**{f.name: None for f in fields if f.kw_only and f.name[0] != "_" and f.name not in keep})

    def to(self, device: torch.device | str) -> Self:
        """A copy with every tensor on `device`."""
        moved = {k.lstrip("_"): v.to(device) if isinstance(v, Tensor) else v for k, v in vars(self).items()}
        return type(self)(**moved)

    def _expect(self, axis: str, size: int, *names: str) -> None:
        for name in names:
            value = vars(self).get(name)
            if isinstance(value, Tensor) and tuple(value.shape) != (size,):
                raise ValueFault(
                    f"{type(self).__name__}.{name} has shape {tuple(value.shape)}; expected ({size},), "
                    f"one value per {axis}"
                )


def _shape(value: Any) -> Any:
    return list(value.shape) if isinstance(value, Tensor) else value
