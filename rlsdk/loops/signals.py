"""Signal handling: of a run, which Ctrl-C, SIGTERM or SIGHUP ends after its step, and of servers."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType

from rlsdk.isolation.watching import main_loop

INTERRUPTED = 130
"""Exit status of a program that a signal ended."""
GRACE_SECONDS = 10.0
"""Seconds that an immediate end may take; then the process just exits."""


def on_interrupt(call: Callable[[], object]) -> None:
    """Call a function in the running event loop at each Ctrl-C or SIGTERM, which then end nothing by themselves."""
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, call)


@contextmanager
def handled(notice: str, end: Callable[[], object], save: Callable[[], object] | None = None) -> Iterator[None]:
    """Handle signals while a block runs; no effect outside the main thread, since only that one can handle signals.

    These are handlers of the process, not of the event loop, so they work even if a workflow blocks the loop.

    Args:
        notice: Shown at the first Ctrl-C, SIGTERM or SIGHUP.
        end: Called in the event loop at that signal.
        save: Called in the event loop at SIGUSR1; if None, the signal is ignored.

    Raises:
        KeyboardInterrupt: A second Ctrl-C or SIGTERM came. If the process is still there after `GRACE_SECONDS`, or at
            a third one, it exits.
    """
    if threading.current_thread() is not threading.main_thread():
        with main_loop(end):
            yield
        return
    loop = asyncio.get_running_loop()
    deadline = threading.Timer(GRACE_SECONDS, os._exit, (INTERRUPTED,))
    deadline.daemon = True
    asked = 0

    def ask_to_end(_: int, __: FrameType | None) -> None:
        nonlocal asked
        asked += 1
        if asked == 1:
            loop.call_soon_threadsafe(end)
            with suppress(OSError):  # Ctrl-C also ends the `tee` that standard error is piped to
                os.write(sys.__stderr__.fileno() if sys.__stderr__ else 2, f"{notice}\n".encode())
            return
        if asked > 2:
            os._exit(INTERRUPTED)
        deadline.start()
        raise KeyboardInterrupt

    def hang_up(_: int, __: FrameType | None) -> None:
        if not asked:  # when a terminal closes, both the kernel and the shell send it
            ask_to_end(_, __)

    def ask_to_save(_: int, __: FrameType | None) -> None:
        if save is not None:
            loop.call_soon_threadsafe(save)

    wanted = {signal.SIGINT: ask_to_end, signal.SIGTERM: ask_to_end, signal.SIGUSR1: ask_to_save}
    if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:  # under `nohup`, SIGHUP stays ignored
        wanted[signal.SIGHUP] = hang_up
    before = {number: signal.signal(number, handler) for number, handler in wanted.items()}
    try:
        with main_loop(end):
            yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        deadline.cancel()
