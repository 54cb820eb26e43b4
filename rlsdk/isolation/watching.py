"""Connect code that starts actors or enters stages with the run's watchdog and its trace, if there are any."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Protocol

CUT_SECONDS = 1.0
"""Seconds after which the span of a constantly busy actor is cut, at its next answer."""


class SpanRecorder(Protocol):
    """Interface of a recorder of a run's spans."""

    def add(self, actor: str, name: str, begin: float, end: float, counts: dict[str, float]) -> None:
        """Record a span.

        Args:
            actor: Name of the busy actor, such as `learner rank 0`.
            name: What it was busy with, such as `update`.
            begin: Seconds since 1970.
            end: Seconds since 1970.
            counts: Name -> amount of work in the span, such as tokens.
        """
        ...


RECORDER: ContextVar[SpanRecorder | None] = ContextVar("rlsdk_spans", default=None)
"""Recorder of the run that this code belongs to."""


_MONOTONIC_ZERO = time.time() - time.monotonic()
"""Time since 1970 at which the monotonic clock, which nobody sets, was 0."""


def now() -> float:
    """Return the seconds since 1970 for spans; setting the clock during a run does not make them longer or negative."""
    return _MONOTONIC_ZERO + time.monotonic()


def note(actor: str, name: str, begin: float, **counts: float) -> None:
    """Record a span that ends now, if the run records any; see `SpanRecorder.add`."""
    if (recorder := RECORDER.get()) is not None:
        recorder.add(actor, name, begin, now(), counts)


@contextmanager
def span(actor: str, name: str) -> Iterator[None]:
    """Record a block as a span; see `SpanRecorder.add`."""
    begin = now()
    try:
        yield
    finally:
        note(actor, name, begin)


class Busy:
    """Count an actor's open requests, and record spans while there are any."""

    def __init__(self, actor: str, name: str) -> None:
        """Start without requests; see `SpanRecorder.add` for the names."""
        self._actor, self._name = actor, name
        self._open, self._begin = 0, 0.0
        self._counts: dict[str, float] = {}

    def begin(self, requests: int = 1) -> None:
        """Count requests as started."""
        if not self._open:
            self._begin = now()
        self._open += requests

    def end(self, requests: int = 1, **counts: float) -> None:
        """Count requests as answered.

        Args:
            requests: Number of requests.
            **counts: Amount of work done for them, such as tokens.
        """
        self._open = max(self._open - requests, 0)
        for name, value in {"requests": float(requests), **counts}.items():
            self._counts[name] = self._counts.get(name, 0.0) + value
        end = now()
        if not self._open or end - self._begin >= CUT_SECONDS:
            note(self._actor, self._name, self._begin, **self._counts, waiting=float(self._open))
            self._begin, self._counts = end, {}

    def drop(self) -> None:
        """Count all requests as ended, since their actor is gone."""
        if self._open:
            self.end(self._open)


class Watch(Protocol):
    """Interface of the watchdog for code that needs watching."""

    def enter(self, stage: str) -> object:
        """Begin a stage; returns its key."""
        ...

    def leave(self, key: object) -> None:
        """End a stage."""
        ...

    def add_actor(self, name: str, actor: Any, log: str, *, replaced: bool, responsive: bool = False) -> None:
        """Watch a Ray actor that answers `identity`."""
        ...

    def remove_actor(self, actor: Any) -> None:
        """Stop watching an actor."""
        ...

    def add_loop(
        self, loop: asyncio.AbstractEventLoop, thread: threading.Thread, name: str, *, says: bool = True
    ) -> Callable[[], None]:
        """Watch a thread's event loop, and log stalls if `says`; return a function that stops watching."""
        ...

    def add_run(self, task: asyncio.Task[Any], finish: Callable[[], object]) -> Callable[[], None]:
        """Register how to end the run: after its step by `finish`, at once by cancelling the task."""
        ...


CURRENT: ContextVar[Watch | None] = ContextVar("rlsdk_watchdog", default=None)
"""Watchdog of the run that this code belongs to."""


@contextmanager
def stage(name: str) -> Iterator[None]:
    """Report a stage of the run to the watchdog and the trace, for the duration of a block.

    Args:
        name: Name of the stage in log lines, such as `update`.
    """
    watch = CURRENT.get()
    with span("driver", name):
        if watch is None:
            yield
            return
        key = watch.enter(name)
        try:
            yield
        finally:
            watch.leave(key)


def watch_actor(name: str, actor: Any, log: object, *, replaced: bool, responsive: bool) -> None:
    """Let the watchdog watch an actor.

    Args:
        name: Name of the actor in messages, such as `learner rank 0`.
        actor: Handle of an actor with a method `identity` that returns `isolation.vitals.identity(…)`.
        log: Path of the file that receives its output.
        replaced: True if a dead actor is replaced, so that the run continues.
        responsive: True if it answers within `watchdog.busy`, whatever it works on; otherwise, its calls may take
            `watchdog.learner_busy`.
    """
    if (watch := CURRENT.get()) is not None:
        watch.add_actor(name, actor, str(log), replaced=replaced, responsive=responsive)


def forget_actor(actor: Any) -> None:
    """Stop watching an actor that is about to be ended."""
    if (watch := CURRENT.get()) is not None:
        watch.remove_actor(actor)


@contextmanager
def main_loop(finish: Callable[[], object] | None = None) -> Iterator[None]:
    """Let the watchdog watch the running event loop, and end the run if necessary, for the duration of a block.

    Args:
        finish: Called in the loop to end the run after its step, with a checkpoint; by default, the task is cancelled.
    """
    watch, task = CURRENT.get(), asyncio.current_task()
    if watch is None or task is None:
        yield
        return
    forget_run = watch.add_run(task, finish or task.cancel)
    forget_loop = watch.add_loop(asyncio.get_running_loop(), threading.current_thread(), "the run")
    try:
        yield
    finally:
        forget_loop()
        forget_run()
