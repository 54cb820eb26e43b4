"""The weight transfer `object_store`: the weights whole, as one object that all engines of a node map into memory."""

from __future__ import annotations

from collections.abc import Iterator

from rlsdk.contracts import Weights
from rlsdk.marks import weight_transfer
from rlsdk.weights import joined


@weight_transfer("object_store")
class ObjectStore:
    """Send weights through Ray's object store: rank 0 gathers them, and each node gets one copy.

    When to use: always, unless these copies do not fit: beside the model, rank 0 holds all weights once more while it
    sends them, and the store of each node until the next sync. An engine that starts later loads what the others have.
    """

    def offer(self, parts: Iterator[Weights | None], engines: int, host: str) -> Weights | None:
        """Return all weights in one; Ray's store shares them between engines."""
        return joined(parts)
