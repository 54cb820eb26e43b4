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
from collections.abc import Iterable, Sequence
from itertools import takewhile
from pathlib import Path
from types import FrameType
from typing import Any

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


class LoopWatch:
    """Log a warning whenever an event loop is blocked: once at the limit, and again at each doubling of it.

    Many short stalls, such as a `time.sleep(1)` of each conversation, are reported if they take half of a minute. It
    only warns: a run whose loop stays blocked is ended by its watchdog (`cluster.health.WatchedLoop`).

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
    return _described(_users(frames) or frames[0])


def unfinished(
    loop: asyncio.AbstractEventLoop, thread: threading.Thread, helpers: Iterable[threading.Thread]
) -> list[str]:
    """Describe what keeps a loop from closing: code that blocks it, or the tasks and functions that it waits for.

    Args:
        loop: The loop; its tasks are cancelled.
        thread: The loop's thread.
        helpers: Threads in which the loop runs functions.
    """
    frames = _frames(thread)
    if frames and frames[0].f_globals.get("__name__") != "selectors":
        return [culprit(thread)]
    tasks = filter(None, (_users(_awaited(task)) for task in asyncio.all_tasks(loop)))
    called = [called for helper in helpers if (called := _called(helper)) is not None]
    return [f"{_described(frame)}, although it was cancelled" for frame in tasks] + [
        f"asyncio.to_thread: {_described(_users(frames) or frames[-1]) if frames else 'a compiled function'}"
        for frames in called
    ]


def _described(frame: FrameType) -> str:
    plugin, code = _plugins().get(_package(frame)), frame.f_code
    summary = traceback.FrameSummary(code.co_filename, frame.f_lineno, code.co_name)
    where = f"{code.co_qualname} in {code.co_filename}, line {frame.f_lineno}"
    line = f" ({summary.line})" if summary.line else ""
    return f"plugin {plugin!r}, {where}{line}" if plugin else f"{where}{line}"


def _users(frames: Sequence[FrameType]) -> FrameType | None:
    """Return the first frame of a user's or a plugin's code; None if there is none."""
    plugins = _plugins()
    return next((f for f in frames if _package(f) in plugins or not f.f_code.co_filename.startswith(_NOT_USERS)), None)


def _package(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__")).partition(".")[0]


def _plugins() -> dict[str, str]:
    """Return the names of the installed plugins, by top-level package."""
    plugins = {entry.module.partition(".")[0]: entry.name for own in discover().values() for entry in own}
    plugins.pop("rlsdk", None)
    return plugins


def _awaited(task: asyncio.Task[Any]) -> list[FrameType]:
    """Return the frames of a waiting task, the innermost first."""
    frames: list[FrameType] = []
    each: Any = task.get_coro()
    while (frame := getattr(each, "cr_frame", None)) is not None:
        frames.insert(0, frame)
        each = each.cr_await
    return frames


def _called(helper: threading.Thread) -> list[FrameType] | None:
    """Return the frames of the function that a thread of an executor runs, the innermost first; None if it is idle."""
    frames = _frames(helper)
    if not frames or frames[0].f_code.co_name == "_worker":
        return None
    return list(takewhile(lambda frame: frame.f_globals.get("__name__") != "concurrent.futures.thread", frames))


def stack(thread: threading.Thread) -> str:
    """Format the innermost calls of a thread as a Python traceback."""
    frames = _frames(thread)[:_STACK]
    return "".join(traceback.format_list(traceback.StackSummary.extract((f, f.f_lineno) for f in reversed(frames))))


def _frames(thread: threading.Thread) -> list[FrameType]:
    """Return the frames of a thread, the innermost first."""
    frame = sys._current_frames().get(thread.ident or 0)
    return [] if frame is None else [each for each, _ in traceback.walk_stack(frame)]
