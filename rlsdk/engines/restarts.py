"""How engines that die are replaced, and how those on nodes that leave the cluster are moved."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection
from typing import Any

import attrs

from rlsdk.engines.client import EngineClient

log = logging.getLogger(__name__)
PATIENCE = 60.0
"""Seconds that an engine may take to come back before the log says what it may be waiting for; and again, and again."""
DRAIN_SECONDS = 5.0
"""Seconds between two looks for nodes that are about to leave the cluster."""

Start = Callable[[int, int], tuple[Any, Any]]
"""Starts the engine of a rank, given the number of earlier starts; returns its handle, and what to wait for."""


@attrs.define(kw_only=True)
class RestartPolicy:
    """Policy for restarting engines that died.

    Attributes:
        client: Client that routes requests to the running engines.
        start: Starts a replacement for a dead engine.
        most: Number of deaths per rank that a run survives.
        missing: Returns a sentence naming the resources Ray lacks for so many more engines; empty if there is room.
        draining: Returns the ids of nodes that are about to leave the cluster; None if nodes never leave.
    """

    client: EngineClient
    start: Start
    most: int
    missing: Callable[[int], str] = lambda count: ""
    draining: Callable[[], Collection[str]] | None = None


async def patiently(rank: int, ready: Any) -> None:
    """Wait for an engine's start, and log which resources are free while it takes long."""
    import ray

    start = asyncio.ensure_future(_awaited(ready))
    try:
        while not (await asyncio.wait({start}, timeout=PATIENCE))[0]:
            free = {name: count for name, count in ray.available_resources().items() if name in ("CPU", "GPU")}
            log.warning("engine %d has not started yet; free in Ray: %s", rank, free)
        start.result()
    finally:
        start.cancel()


async def _awaited(call: Any) -> Any:
    return await call
