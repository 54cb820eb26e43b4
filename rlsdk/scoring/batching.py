"""One call for several rollouts."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Sequence
from typing import Any

from rlsdk.types import Rollout


class Batcher:
    """Gathers the rollouts that finish in one turn of the event loop into calls."""

    def __init__(self, call: Callable[[Sequence[Rollout]], Any], most: Callable[[], int] | None = None) -> None:
        """Make one.

        Args:
            call: Takes rollouts and returns as many results, perhaps to be awaited.
            most: Rollouts of one call, asked whenever there are some; left out, there is no limit.
        """
        self._call = call
        self._most = most
        self._waiting: list[tuple[Rollout, asyncio.Future[Any]]] = []
        self._running: set[asyncio.Task[None]] = set()  # the event loop itself does not keep them

    def __call__(self, rollout: Rollout) -> asyncio.Future[Any]:
        """The result for one rollout."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Any] = loop.create_future()
        if not self._waiting:
            loop.call_soon(self._flush)
        self._waiting.append((rollout, future))
        return future

    def _flush(self) -> None:
        waiting, self._waiting = self._waiting, []
        size = self._most() if self._most is not None else len(waiting)
        for start in range(0, len(waiting), size):
            task = asyncio.get_running_loop().create_task(self._run(waiting[start : start + size]))
            self._running.add(task)
            task.add_done_callback(self._running.discard)

    async def _run(self, waiting: Sequence[tuple[Rollout, asyncio.Future[Any]]]) -> None:
        try:
            results = self._call([rollout for rollout, _ in waiting])
            results = await results if inspect.isawaitable(results) else results
            if len(results) != len(waiting):
                raise ValueError(f"returned {len(results)} scores for {len(waiting)} rollouts")
        except Exception as error:  # noqa: BLE001 - handed to each caller, which reports it
            for _, future in waiting:
                if not future.done():  # whoever waited may have gone
                    future.set_exception(error)
            return
        for (_, future), result in zip(waiting, results, strict=True):
            if not future.done():
                future.set_result(result)
