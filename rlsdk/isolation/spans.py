"""Spans of the trace of a run: what each process was busy with, as seen by the driver."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Protocol

__all__ = ["RECORDER", "Busy", "SpanRecorder", "note", "span"]
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


def note(actor: str, name: str, begin: float, **counts: float) -> None:
    """Record a span that ends now, if the run records any; see `SpanRecorder.add`."""
    if (recorder := RECORDER.get()) is not None:
        recorder.add(actor, name, begin, time.time(), counts)


@contextmanager
def span(actor: str, name: str) -> Iterator[None]:
    """Record a block as a span; see `SpanRecorder.add`."""
    begin = time.time()
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
            self._begin = time.time()
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
        now = time.time()
        if not self._open or now - self._begin >= CUT_SECONDS:
            note(self._actor, self._name, self._begin, **self._counts, waiting=float(self._open))
            self._begin, self._counts = now, {}

    def drop(self) -> None:
        """Count all requests as ended, since their actor is gone."""
        if self._open:
            self.end(self._open)
