"""The weight transfer `object_store`: all weights as one object that the engines of a node map into memory."""

from __future__ import annotations

from collections.abc import Iterator

from rlsdk.contracts import Weights
from rlsdk.marks import weight_transfer
from rlsdk.weights import joined


@weight_transfer("object_store")
class ObjectStore:
    """Send weights through Ray's object store: rank 0 gathers them, and each node gets one copy.

    When to use: by default, unless the copies do not fit in memory. Rank 0 holds a second copy of all weights while it
    sends them, and each node's store holds one until the next sync. Engines that start later load the same object.
    """

    def offer(self, parts: Iterator[Weights | None], engines: int, host: str) -> Weights | None:
        """Return all weights as one object, which engines share through Ray's store."""
        return joined(parts)
