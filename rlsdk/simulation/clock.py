"""An event loop whose clock stands still while code runs, and jumps to the next due time when none does."""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Coroutine
from typing import Any, TypeVar

from rlsdk.errors import RunError

T = TypeVar("T")
RESOLUTION = 1e-6
"""Seconds within which two times count as equal: far above the rounding of a time of years, far below a decode step."""


class _Jumps(selectors.DefaultSelector):
    """Waits for nothing: the time that the loop would have waited passes at once."""

    now = 0.0
    turns = 0

    def select(self, timeout: float | None = None) -> Any:
        self.turns += 1
        ready = super().select(0)
        if timeout is None and not ready:
            raise RunError(
                f"virtual time stands still at {self.now:g} s: everything waits, and nothing is due; in virtual time a "
                "thread, a process or a socket cannot be waited for"
            )
        if timeout and not ready:
            self.now += timeout
        return ready


class VirtualLoop(asyncio.SelectorEventLoop):
    """An asyncio event loop in virtual time, which begins at 0; code that sleeps and waits on it runs unchanged.

    Computation takes no time; `asyncio.sleep(3600)` takes a virtual hour and no real time. Callbacks run in the order
    of their due times, so that a run is reproducible.
    """

    def __init__(self) -> None:
        self._jumps = _Jumps()
        super().__init__(self._jumps)
        self._clock_resolution = RESOLUTION  # asyncio's own name; below the rounding, a time would never be reached

    def time(self) -> float:
        """Return the virtual seconds since the loop was created."""
        return self._jumps.now

    @property
    def turns(self) -> int:
        """Number of times the loop looked for due work: a measure of work that does not depend on the machine."""
        return self._jumps.turns


def run_virtually(work: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine to its end in virtual time.

    Raises:
        RunError: Every task waits for something that cannot happen.
    """
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(work)
