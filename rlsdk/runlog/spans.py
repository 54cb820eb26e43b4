"""The spans of a run: `spans.jsonl` in its folder, one line per interval in which a process was busy."""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import attrs

from rlsdk.isolation.watching import RECORDER
from rlsdk.runlog.metrics import open_lines

log = logging.getLogger(__name__)
SPANS = "spans.jsonl"
FLUSH_SECONDS = 2.0
"""Seconds after which lines are flushed, so that a trace can be written while a run trains."""


@attrs.frozen
class Span:
    """An interval in which a process of a run was busy.

    Attributes:
        actor: `driver`, `engine 0`, `learner rank 0`, or the name of an environment worker.
        name: Activity.
        begin: Seconds since 1970.
        end: Seconds since 1970.
        counts: Name -> count, such as requests and tokens.
    """

    actor: str
    name: str
    begin: float
    end: float
    counts: dict[str, float] = attrs.field(factory=dict)


class SpansFile:
    """Write spans, from any thread; a disk error ends only the recording."""

    def __init__(self, path: Path) -> None:
        """Open a file to append to.

        Raises:
            OSError: The file cannot be written.
        """
        self._path, self._lock = path, threading.Lock()
        self._file: Any = open_lines(path)
        self._flushed = time.monotonic()

    def add(self, actor: str, name: str, begin: float, end: float, counts: dict[str, float]) -> None:
        """Append a span; see `SpanRecorder.add`."""
        line = json.dumps([actor, name, round(begin, 6), round(end, 6), counts]) + "\n"
        with self._lock:
            if self._file is None:
                return
            try:
                self._file.write(line)
                if time.monotonic() - self._flushed > FLUSH_SECONDS:
                    self._file.flush()
                    self._flushed = time.monotonic()
            except OSError as error:
                log.debug("no more spans are written to %s: %s", self._path, error)
                self._end()

    def close(self) -> None:
        """Write the remaining spans, and close the file."""
        with self._lock:
            self._end()

    def _end(self) -> None:
        file, self._file = self._file, None
        if file is not None:
            try:
                file.close()
            except OSError as error:
                log.debug("the last spans could not be written to %s: %s", self._path, error)


@contextmanager
def recorded(folder: Path) -> Iterator[None]:
    """Record the spans of a run during a block, keeping those from before a resume."""
    try:
        file = SpansFile(folder / SPANS)
    except OSError as error:
        log.debug("no spans are recorded: %s", error)
        yield
        return
    token = RECORDER.set(file)
    try:
        yield
    finally:
        file.close()
        try:
            RECORDER.reset(token)
        except ValueError:  # a trainer used step by step may be closed in another context
            RECORDER.set(None)


def read_spans(folder: Path) -> list[Span]:
    """Return the spans of a run in order of start time, skipping incomplete lines."""
    try:
        lines = (folder / SPANS).read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return []
    found = []
    for line in lines:
        try:
            actor, name, begin, end, counts = json.loads(line)
            found.append(
                Span(str(actor), str(name), float(begin), float(end), {str(k): float(v) for k, v in counts.items()})
            )
        except (ValueError, TypeError, AttributeError, RecursionError):
            continue
    return sorted(found, key=lambda each: (each.begin, -each.end))
