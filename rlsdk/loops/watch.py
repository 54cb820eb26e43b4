"""Detect that an event loop is blocked, for how long, and by which code."""

from __future__ import annotations

import asyncio
import logging
import os
import sys
import sysconfig
import threading
import time
import traceback
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from types import FrameType

from rlsdk.plugins.discovery import discover

log = logging.getLogger(__name__)
BLOCKED_SECONDS = 10.0
"""Seconds without an iteration after which a loop counts as blocked."""
PAUSE_SECONDS = 0.1
"""Seconds between two probes of a loop."""
STALL_SECONDS = 0.1
"""Seconds without an iteration from which on the blocking code is noted."""
WINDOW_SECONDS = 60.0
"""Period over which short stalls are added up; it doubles with each warning."""
ADVICE = "Call code that blocks with `await asyncio.to_thread(function, …)`, or use an async client."
_STACK = 12
"""Number of innermost calls to show."""
_LIBRARIES = tuple(f"{sysconfig.get_paths()[name]}{os.sep}" for name in ("stdlib", "platstdlib", "purelib", "platlib"))
_NOT_USERS = (f"{Path(__file__).resolve().parents[1]}{os.sep}", *_LIBRARIES, "<")
"""Prefixes of file names: rlsdk, installed libraries, and code without a file."""
IDLE_SHARE = 0.02
"""Share of a core below which a thread counts as idle."""


class LoopWatch:
    """Log a warning whenever an event loop is blocked: once at the limit, and again at each doubling of it.

    Many short stalls, such as a `time.sleep(1)` of each conversation, are reported if they take half of a minute.

    Attributes:
        longest: Longest stall so far in seconds, and the code that was running.
    """

    def __init__(
        self, loop: asyncio.AbstractEventLoop, thread: threading.Thread, name: str, limit: float = BLOCKED_SECONDS
    ) -> None:
        """Start watching, in a daemon thread; the loop counts as blocked after `limit` seconds without an iteration."""
        self._loop, self._thread, self._name, self._limit = loop, thread, name, limit
        self.longest = 0.0, ""
        self._stalls: defaultdict[str, float] = defaultdict(float)
        self._since, self._window = time.monotonic(), WINDOW_SECONDS
        self._closed = threading.Event()
        threading.Thread(target=self._watch, name="rlsdk-loop-watch", daemon=True).start()

    def close(self) -> None:
        """Stop watching."""
        self._closed.set()

    def _watch(self) -> None:
        while not self._closed.wait(PAUSE_SECONDS):
            try:
                self._probe()
            except RuntimeError:  # the loop has ended
                return
            self._report_stalls(time.monotonic() - self._since)

    def _probe(self) -> None:
        """Wait for the loop's next iteration, and note or report what blocks it until then."""
        turned, began, limit, blocked = threading.Event(), time.monotonic(), self._limit, False
        self._loop.call_soon_threadsafe(turned.set)
        if turned.wait(min(STALL_SECONDS, limit)):
            return
        code = culprit(self._thread)
        while not turned.wait(limit) and not self._closed.is_set():
            blocked = True
            seconds = time.monotonic() - began
            log.warning(
                "the event loop of %s has been blocked for %.0f s, and everything on it waits: %s. %s\n%s",
                *(self._name, seconds, culprit(self._thread), ADVICE, stack(self._thread)),
            )
            limit = seconds  # twice as long in total
        seconds = time.monotonic() - began
        self.longest = max(self.longest, (seconds, code))
        if not blocked:
            self._stalls[code] += seconds
        elif turned.is_set():
            log.warning("the event loop of %s is running again, after %.0f s", self._name, seconds)

    def _report_stalls(self, period: float) -> None:
        """Warn if stalls below the limit took half of the period that has just ended."""
        if period < self._window:
            return
        if (blocked := sum(self._stalls.values())) >= period / 2:
            seconds, code = max((seconds, code) for code, seconds in self._stalls.items())
            log.warning(
                "the event loop of %s was blocked for %.0f of the last %.0f s, %.0f s of them by %s; everything on it "
                "waited. %s If it computes, raise rollout.workers",
                *(self._name, blocked, period, seconds, code, ADVICE),
            )
            self._window *= 2
        self._since, self._stalls = time.monotonic(), defaultdict(float)


def culprit(thread: threading.Thread) -> str:
    """Describe what a thread is doing: plugin, function, file and line of the innermost user call."""
    frames = _frames(thread)
    if not frames:
        return f"thread {thread.name!r} has ended"
    plugins = {entry.module.partition(".")[0]: entry.name for own in discover().values() for entry in own}
    plugins.pop("rlsdk", None)

    def plugin_of(frame: FrameType) -> str | None:
        return plugins.get(str(frame.f_globals.get("__name__")).partition(".")[0])

    def is_users(frame: FrameType) -> bool:
        file = frame.f_code.co_filename
        return plugin_of(frame) is not None or not file.startswith(_NOT_USERS)

    frame = next(filter(is_users, frames), frames[0])
    plugin, code = plugin_of(frame), frame.f_code
    summary = traceback.FrameSummary(code.co_filename, frame.f_lineno, code.co_name)
    where = f"{code.co_qualname} in {code.co_filename}, line {frame.f_lineno}"
    line = f" ({summary.line})" if summary.line else ""
    return f"plugin {plugin!r}, {where}{line}" if plugin else f"{where}{line}"


def stack(thread: threading.Thread) -> str:
    """Format the innermost calls of a thread as a Python traceback."""
    frames = _frames(thread)[:_STACK]
    return "".join(traceback.format_list(traceback.StackSummary.extract((f, f.f_lineno) for f in reversed(frames))))


def _frames(thread: threading.Thread) -> list[FrameType]:
    """Return the frames of a thread, the innermost first."""
    frame = sys._current_frames().get(thread.ident or 0)
    return [] if frame is None else [each for each, _ in traceback.walk_stack(frame)]


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
