"""An asyncio event loop in virtual time: the clock stops while code runs, and jumps to the next timer."""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Coroutine
from typing import Any, TypeVar

from rlsdk.errors import RunError

T = TypeVar("T")
RESOLUTION = 1e-6
"""Seconds within which two times count as equal: more than rounding over years, less than a decode step."""


class _Jumps(selectors.DefaultSelector):
    """Returns at once; the time that the loop would have waited is added to the clock."""

    now = 0.0
    turns = 0

    def select(self, timeout: float | None = None) -> Any:
        self.turns += 1
        ready = super().select(0)
        if timeout is None and not ready:
            raise RunError(
                f"deadlock at {self.now:g} s of virtual time: all tasks wait, and no timer is set. Code that waits for "
                "a thread, a process or a socket cannot run in virtual time"
            )
        if timeout and not ready:
            self.now += timeout
        return ready


class VirtualLoop(asyncio.SelectorEventLoop):
    """An asyncio event loop in virtual time, which starts at 0.

    Computation takes no virtual time; `asyncio.sleep(3600)` takes a virtual hour and no real time. Callbacks run in the
    order of their due times, so that a run is reproducible.
    """

    def __init__(self) -> None:
        self._jumps = _Jumps()
        super().__init__(self._jumps)
        # An attribute of asyncio. With a finer resolution, rounding could prevent a timer from ever firing.
        self._clock_resolution = RESOLUTION

    def time(self) -> float:
        """Return the virtual seconds since the loop was created."""
        return self._jumps.now

    @property
    def turns(self) -> int:
        """Number of iterations of the loop: a measure of work that does not depend on the machine."""
        return self._jumps.turns


def run_virtually(work: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine to completion in virtual time.

    Raises:
        RunError: Every task waits for something that cannot happen.
    """
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(work)
