"""Limits of a conversation: context length and time."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import attrs

from rlsdk.errors import OutOfRoomError


@attrs.define
class CutOff:
    """Record of whether a conversation was cut off."""

    reached: bool = False


@asynccontextmanager
async def limited(seconds: float | None) -> AsyncIterator[CutOff]:
    """Exit the block once the conversation fills the model's context length, or takes longer than `seconds`.

    Args:
        seconds: Time limit of the block; None for no limit.

    Yields:
        Record that states, after the block, whether a limit was reached.
    """
    limit = CutOff()
    try:
        async with asyncio.timeout(seconds) as clock:
            yield limit
    except OutOfRoomError:
        limit.reached = True
    except TimeoutError:
        if not clock.expired():
            raise
        limit.reached = True
