"""A plugin of rlsdk in one file."""

from __future__ import annotations

from collections.abc import Iterator

import attrs
import rlsdk
from rlsdk.contracts import Weights


@rlsdk.weight_transfer("my_weight_transfer")
@attrs.define(kw_only=True)
class MyWeightTransfer:
    """Sends all weights as one object in Ray's store, unless they are too large for it.

    Attributes:
        limit_gib: Maximum size of the weights in GiB.
    """

    limit_gib: float = 16.0

    def offer(self, parts: Iterator[Weights | None], engines: int, host: str) -> Weights | None:
        """Return the weights, which engines load directly; with `send` and `receive`, an address would do."""
        held = [part for part in parts if part is not None]
        size = sum(array.nbytes for part in held for array in part.tensors.values()) / 2**30
        if size > self.limit_gib:
            raise ValueError(f"the weights are {size:.1f} GiB, and limit_gib is {self.limit_gib:g}; raise it")
        tensors = {name: array for part in held for name, array in part.tensors.items()}
        dtypes = {name: dtype for part in held for name, dtype in part.dtypes.items()}
        return Weights(held[0].version, tensors, dtypes, held[0].adapter) if held else None
