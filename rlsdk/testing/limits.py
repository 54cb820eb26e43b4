"""Time limit for foreign code."""

from __future__ import annotations

import contextlib
import signal
import threading
import time
from collections.abc import Iterator
from types import FrameType

from rlsdk.testing.findings import Violated


class _OutOfTime(BaseException):
    """Not an `Exception`, so that the interrupted code cannot catch it and continue."""


@contextlib.contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Interrupt a block after a number of seconds.

    Where signals cannot do that (outside the main thread, on Windows), only report afterwards that it was too slow.

    Raises:
        Violated: The block took longer.
    """
    begun = time.monotonic()
    late = Violated("late", f"an answer within {seconds:g} s", "none")
    can_interrupt = hasattr(signal, "setitimer") and threading.current_thread() is threading.main_thread()
    try:
        with _alarm(seconds) if can_interrupt else contextlib.nullcontext():
            yield
    except _OutOfTime:
        raise late from None
    except BaseExceptionGroup as error:  # the alarm rang in a task of a TaskGroup
        if error.subgroup(_OutOfTime) is None:
            raise
        raise late from None
    if time.monotonic() - begun > seconds:
        raise late


@contextlib.contextmanager
def _alarm(seconds: float) -> Iterator[None]:
    """Raise after `seconds`; an alarm that was already set rings afterwards."""

    def ring(_: int, __: FrameType | None) -> None:
        raise _OutOfTime

    before = signal.signal(signal.SIGALRM, ring)
    left, interval = signal.setitimer(signal.ITIMER_REAL, seconds)
    begun = time.monotonic()
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
        if left:
            signal.setitimer(signal.ITIMER_REAL, max(left - (time.monotonic() - begun), 0.001), interval)
