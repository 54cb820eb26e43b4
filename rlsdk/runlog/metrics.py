"""Metrics, task counts and spans of a run: files with one JSON object per line; a kill may cut off the last line."""

from __future__ import annotations

import json
import logging
import os
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TextIO

import attrs

from rlsdk.isolation.watching import RECORDER

log = logging.getLogger(__name__)
METRICS, LEDGER = "metrics.jsonl", "ledger.jsonl"
_SHOWN = 60
"""Maximum number of characters of a malformed line in a message."""
SPANS = "spans.jsonl"
FLUSH_SECONDS = 2.0
"""Seconds after which lines are flushed, so that a trace can be written while a run trains."""


def open_lines(path: Path) -> TextIO:
    """Open a file of lines for appending; first end a last line that a kill or a full disk cut off."""
    with path.open("ab+") as file:
        if file.seek(0, os.SEEK_END):
            file.seek(-1, os.SEEK_END)
            if file.read(1) != b"\n":
                file.write(b"\n")
    return path.open("a", encoding="utf-8")


def lines_up_to(path: Path, step: int) -> list[str]:
    """Return the well-formed lines of a metrics file whose step is at most `step`, each with its line break."""
    return [f"{line.text}\n" for line in _lines(path) if line.content and line.content["step"] <= step]


def read_metrics(folder: Path) -> list[dict[str, Any]]:
    """Read a run's `metrics.jsonl`, skipping malformed lines with a warning."""
    found = list(_lines(folder / METRICS))
    for line in found:
        if line.fault:
            log.warning("%s; the line is skipped", line.fault)
    return [line.content for line in found if line.content]


def garbled_lines(path: Path) -> list[str]:
    """Describe the malformed lines of a metrics file, except a last one truncated by a kill."""
    return [line.fault for line in _lines(path) if line.fault]


@attrs.frozen
class _Line:
    """A line of a metrics file.

    Attributes:
        text: Text of the line, without the line break.
        content: Parsed content; None if the line is garbled.
        whole: True if it ends with a line break; otherwise a kill cut it off, or it is being written.
        fault: Description of the fault; empty for a good line and for one that was cut off.
    """

    text: str
    content: dict[str, Any] | None
    whole: bool
    fault: str


def _lines(path: Path) -> Iterator[_Line]:
    raw = path.read_bytes().split(b"\n") if path.is_file() else [b""]
    for number, line in enumerate(raw, 1):
        text, whole = line.decode("utf-8", errors="replace"), number < len(raw)
        if not text and not whole:
            continue
        try:
            content = json.loads(text)
        except (ValueError, RecursionError):
            content = None
        if not isinstance(content, dict) or type(content.get("step")) is not int:
            content = None
        fault = f"{path}, line {number}: expected a JSON object with a step, got {text[:_SHOWN]!r}"
        yield _Line(text, content, whole, fault if whole and content is None else "")


def _readable(path: Path) -> list[str]:
    """Return the lines of a file; none if it cannot be read."""
    try:
        return path.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return []


def note_ledger(folder: Path, step: int, sources: Mapping[str, Mapping[str, int]]) -> None:
    """Append the counts of each task source after a step.

    Args:
        folder: Run folder.
        step: Number of training steps done.
        sources: Source -> count name -> number of groups since the run began.
    """
    try:
        with open_lines(folder / LEDGER) as file:
            file.write(json.dumps({"step": step, "sources": sources}) + "\n")
    except OSError as error:  # the training reports a full disk
        log.debug("%s cannot be written: %s", folder / LEDGER, error)


def read_ledger(folder: Path, most: int = 500) -> list[dict[str, Any]]:
    """Return the counts by step, at most `most` of them; if a resumed run repeated a step, its later counts."""
    found: list[dict[str, Any]] = []
    for line in _readable(folder / LEDGER):
        try:
            row = json.loads(line)
            step = int(row["step"])
        except (ValueError, LookupError, TypeError):
            continue
        while found and found[-1]["step"] >= step:
            found.pop()
        found.append(row)
    width = -(-len(found) // most) or 1
    return found[(len(found) - 1) % width :: width] if found else []


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
    found = []
    for line in _readable(folder / SPANS):
        try:
            actor, name, begin, end, counts = json.loads(line)
            found.append(
                Span(str(actor), str(name), float(begin), float(end), {str(k): float(v) for k, v in counts.items()})
            )
        except (ValueError, TypeError, AttributeError, RecursionError):
            continue
    return sorted(found, key=lambda each: (each.begin, -each.end))
