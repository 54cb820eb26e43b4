"""Parts of a conversation that stay on the run's event loop while the workflow runs on another one."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import TypeVar

from rlsdk.contracts import EnvHandle
from rlsdk.loops import LoopBridge
from rlsdk.types import Observation, Step

T = TypeVar("T")


class CrossedWorld:
    """Proxy for an environment on another event loop; the first `reset` opens it there."""

    def __init__(self, bridge: LoopBridge, open_world: Callable[[], EnvHandle]) -> None:
        """Prepare an environment.

        Args:
            bridge: Bridge to the loop of the run.
            open_world: Opens the environment; called on that loop, once.
        """
        self._bridge, self._open = bridge, open_world
        self._world: EnvHandle | None = None

    async def reset(self) -> Observation:
        """See `EnvHandle.reset`."""
        return await self._bridge.run(self._reset)

    async def step(self, text: str) -> Step:
        """See `EnvHandle.step`."""
        world = self._world
        if world is None:
            raise RuntimeError("an environment must be reset before its first step")
        return await self._bridge.run(lambda: world.step(text))

    def close(self) -> None:
        """See `EnvHandle.close`; may be called from either loop's thread."""
        self._bridge.post_from_anywhere(self._leave)

    async def _reset(self) -> Observation:
        if self._world is None:
            self._world = self._open()
        return await self._world.reset()

    def _leave(self) -> None:
        if self._world is not None:
            self._world.close()


@asynccontextmanager
async def entered_on(bridge: LoopBridge, context: AbstractAsyncContextManager[T]) -> AsyncIterator[T]:
    """Enter and exit a context on another event loop, and run the block on this one."""
    value = await bridge.run(context.__aenter__)
    try:
        yield value
    except BaseException as error:
        given = type(error), error, error.__traceback__
        if not await bridge.run(lambda: context.__aexit__(*given)):
            raise
    else:
        await bridge.run(lambda: context.__aexit__(None, None, None))
