"""Limits of a conversation, context length and time, and of the calls in it."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import attrs

from rlsdk.errors import OutOfRoomError
from rlsdk.isolation.threads import Threads


class LateError(Exception):
    """Raised when work reaches a limit; an agent's rollout then ends as truncated."""


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


async def within(seconds: float | None, work: Awaitable[Any]) -> Any:
    """Await work within a time limit.

    Args:
        seconds: Time limit; None for no limit.
        work: Awaitable to run.

    Raises:
        LateError: The work exceeded its time limit.
    """
    try:
        async with asyncio.timeout(seconds) as limit:
            return await work
    except TimeoutError as error:
        if limit.expired():
            raise LateError from error
        raise


async def call_within(
    seconds: float | None, threads: Threads, function: Callable[..., Any], /, *arguments: Any, **named: Any
) -> Any:
    """Call a function within a time limit (None: none), a sync one in a thread; raises what the function raises.

    Raises:
        LateError: The call exceeded its time limit.
    """
    if inspect.iscoroutinefunction(function):
        return await within(seconds, function(*arguments, **named))

    def call() -> tuple[Any, Exception | None]:
        try:
            return function(*arguments, **named), None
        except Exception as error:  # noqa: BLE001 - raised below, so that the function's own TimeoutError is told from this time limit
            return None, error

    try:
        result, raised = await threads.call(call, seconds=seconds)
    except TimeoutError as error:
        raise LateError from error
    if raised is not None:
        raise raised
    return result
