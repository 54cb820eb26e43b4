"""What ends a conversation from outside: the model's length, and time."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import attrs

from rlsdk.errors import OutOfRoomError


@attrs.define
class Limit:
    """Whether a conversation was cut off."""

    reached: bool = False


@asynccontextmanager
async def limited(seconds: float | None) -> AsyncIterator[Limit]:
    """Leave the block once the conversation fills the model's length, or takes longer than `seconds`.

    Args:
        seconds: Until it is left; None: as long as it likes.

    Yields:
        What says, behind the block, whether it was left so.
    """
    limit = Limit()
    try:
        async with asyncio.timeout(seconds) as clock:
            yield limit
    except OutOfRoomError:
        limit.reached = True
    except TimeoutError:
        if not clock.expired():
            raise
        limit.reached = True
