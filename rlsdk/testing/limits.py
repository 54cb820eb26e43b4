"""A limit on the time of code that is not ours."""

from __future__ import annotations

import contextlib
import signal
import threading
import time
from collections.abc import Iterator
from types import FrameType

from rlsdk.testing.findings import Violated


class _OutOfTime(BaseException):
    """No `Exception`: what runs out of time must not take it for an error of its own and go on."""


@contextlib.contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """End what runs inside after so many seconds.

    Where signals cannot do that (outside the main thread, on Windows) it is only found too slow afterwards.

    Raises:
        Violated: It took longer.
    """
    begun = time.monotonic()
    late = Violated("late", f"an answer within {seconds:g} s", "none")
    can_interrupt = hasattr(signal, "setitimer") and threading.current_thread() is threading.main_thread()
    try:
        with _alarm(seconds) if can_interrupt else contextlib.nullcontext():
            yield
    except _OutOfTime:
        raise late from None
    if time.monotonic() - begun > seconds:
        raise late


@contextlib.contextmanager
def _alarm(seconds: float) -> Iterator[None]:
    """Raise after `seconds`; an alarm that somebody else had set rings afterwards."""

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
