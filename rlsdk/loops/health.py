"""Detect that an event loop is blocked, for how long, and by which code."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable

from rlsdk.loops.watch import BLOCKED_SECONDS, culprit, stack

IDLE_SHARE = 0.02
"""Share of a core below which a thread counts as idle."""


class LoopHealth:
    """Make a loop tick, and report when it stops; call `look` regularly."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        thread: threading.Thread,
        name: str,
        warn: float = BLOCKED_SECONDS,
        now: Callable[[], float] = time.monotonic,
        spent: Callable[[int], float] | None = None,
    ) -> None:
        """Watch a loop.

        Args:
            loop: Event loop.
            thread: Thread that runs the loop; asking the loop could fail, since code may block its first iteration.
            name: Name in messages.
            warn: Seconds without a tick after which it counts as blocked, up to `BLOCKED_SECONDS`; infinite for never.
            now: Clock, in seconds.
            spent: CPU seconds of the thread with a native id; default: those of the operating system.
        """
        self._loop, self._thread, self._name, self._now = loop, thread, name, now
        self._limit = warn if warn == float("inf") else min(warn, BLOCKED_SECONDS)
        self._spent = spent or thread_seconds
        self._idle, self._stood = now(), 0.0
        self._asked: float | None = None
        self._cpu = 0.0
        self._said: float | None = None

    @property
    def blocked_for(self) -> float:
        """Seconds since the overdue tick; 0 if none is due."""
        asked = self._asked  # the loop's own thread clears it
        return 0.0 if asked is None else self._now() - asked

    def look(self) -> str:
        """Request a tick; return a message, or an empty string if nothing is new."""
        now = self._now()
        if self._asked is None:
            said, stood, self._said = self._said, self._stood, None
            self._asked = self._idle = now
            try:
                self._loop.call_soon_threadsafe(self._tick)
            except RuntimeError:  # it has ended
                self._asked = None
            return "" if said is None else f"the event loop of {self._name} runs again, after {stood:.0f} s"
        if self.blocked_for < (self._limit if self._said is None else 2 * self._said):
            return ""
        self._said = self.blocked_for
        return f"{self.describe()}, and everything on it waits:\n{stack(self._thread).rstrip()}"

    def idle_for(self, now: float) -> float:
        """Seconds for which the loop has been blocked while its thread used no CPU."""
        asked = self._asked  # the loop's own thread clears it
        if asked is None or self._thread.native_id is None:
            return 0.0
        cpu = self._spent(self._thread.native_id)
        if cpu - self._cpu >= IDLE_SHARE * max(now - self._idle, 0.5):
            self._cpu, self._idle = cpu, now
        return min(now - self._idle, now - asked)

    def describe(self) -> str:
        """Describe for how long the loop has been blocked, and by which code."""
        return (
            f"the event loop of {self._name} has been blocked for {self.blocked_for:.0f} s in {culprit(self._thread)}"
        )

    def _tick(self) -> None:
        self._cpu = self._spent(threading.get_native_id())
        self._stood, self._asked = self.blocked_for, None


def thread_seconds(native: int) -> float:
    """Return the CPU seconds of a thread of this process."""
    import psutil

    found = next((t for t in psutil.Process().threads() if t.id == native), None)
    return 0.0 if found is None else float(found.user_time + found.system_time)
