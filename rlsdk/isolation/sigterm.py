"""SIGTERM as Ctrl-C, also where no handler of a run is installed: while it starts and while it ends."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


def interrupt(_: int, frame: FrameType | None) -> None:
    """Handle SIGTERM as SIGINT is handled at this moment; interrupt if SIGINT is ignored, as in `rlsdk … &`."""
    handler = signal.getsignal(signal.SIGINT)
    (handler if callable(handler) else signal.default_int_handler)(signal.SIGINT, frame)


@contextmanager
def as_interrupt() -> Iterator[None]:
    """Handle SIGTERM like Ctrl-C while a block runs, unless the program has a handler of its own.

    No effect outside the main thread, since only that one can handle signals.
    """
    main = threading.current_thread() is threading.main_thread()
    if not main or signal.getsignal(signal.SIGTERM) != signal.SIG_DFL:
        yield
        return
    signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        main = threading.current_thread() is threading.main_thread()  # which another thread may leave the block for
        if main and signal.getsignal(signal.SIGTERM) is interrupt:  # unless the block has installed another
            signal.signal(signal.SIGTERM, signal.SIG_DFL)


def restore() -> None:
    """Install the program's own handler again, if it has one.

    Ray's core puts a native one in front of it, which prints a stack, and aborts the process three seconds later.
    """
    handler = signal.getsignal(signal.SIGTERM)
    if threading.current_thread() is threading.main_thread() and callable(handler):
        signal.signal(signal.SIGTERM, handler)
