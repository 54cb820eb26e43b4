"""Metrics of a run as columns: `metrics.jsonl` is read once, then only what is appended to it."""

from __future__ import annotations

import json
import math
import os
import threading
from array import array
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from rlsdk.contracts import History, Series
from rlsdk.runlog.metrics import METRICS

POINTS = 2000
"""Maximum number of points per curve; longer curves are thinned out."""
_CHUNK = 2**20
_KEPT = 4096
"""Number of bytes before the read position that must be unchanged."""
_GAP = math.nan


class MetricTable:
    """Steps and values of every metric in a growing file.

    Attributes:
        generation: Number of times the file was truncated, as a resumed run does; earlier rows are then invalid.
        steps: Step of each row.
        changed: Modification time of the file when it last grew, in seconds since 1970; 0 before.
    """

    def __init__(self, folder: Path) -> None:
        self._path = folder / METRICS
        self._lock = threading.Lock()
        self._clear()
        self.generation = 0

    def _clear(self) -> None:
        self.steps = array("q")
        self.changed = 0.0
        self._columns: dict[str, array[float]] = {}
        self._offset, self._rest, self._seen = 0, b"", b""

    def refresh(self) -> None:
        """Read data appended since the last call."""
        with self._lock:
            try:
                state = os.stat(self._path)
            except FileNotFoundError:
                state = None
            if state is None or state.st_size < self._offset or not self._as_it_was():
                if self._offset:
                    self.generation += 1
                self._clear()
            if state is None or state.st_size == self._offset:
                return
            self.changed = state.st_mtime
            with self._path.open("rb") as file:
                file.seek(self._offset)
                while chunk := file.read(_CHUNK):
                    self._offset += len(chunk)
                    self._take(chunk)

    def _as_it_was(self) -> bool:
        """Return True if the data read last is unchanged; a run that starts over or is resumed rewrites it."""
        with self._path.open("rb") as file:
            file.seek(self._offset - len(self._seen))
            return file.read(len(self._seen)) == self._seen

    def _take(self, chunk: bytes) -> None:
        self._seen = (self._seen + chunk)[-_KEPT:]
        *lines, self._rest = (self._rest + chunk).split(b"\n")
        for line in lines:
            try:
                content = json.loads(line)
                if isinstance(content, dict) and type(content.get("step")) is int:
                    self._add(content["step"], content)
            except (ValueError, RecursionError, OverflowError):
                continue

    def _add(self, step: int, content: dict[str, Any]) -> None:
        row = len(self.steps)
        values = {n: float(v) for n, v in content.items() if n != "step" and isinstance(v, int | float)}
        self.steps.append(step)
        for name, value in values.items():
            column = self._columns.setdefault(name, array("d"))
            column.extend([_GAP] * (row - len(column)))
            column.append(value)

    @property
    def names(self) -> list[str]:
        """Names of all metrics, sorted."""
        with self._lock:
            return sorted(self._columns)

    def last(self, name: str) -> float | None:
        """Return the last value of a metric; None if there is none."""
        with self._lock:
            column = self._columns.get(name, array("d"))
            return next((value for value in reversed(column) if math.isfinite(value)), None)

    def history(self) -> History:
        """Return all metrics as a history for diagnoses."""
        with self._lock:
            curves = {name: self._curve(name, len(self.steps)) for name in self._columns}
            return History({name: Series(*curve, name) for name, curve in curves.items()}, max(self.steps, default=0))

    def points(self, names: Iterable[str], most: int = POINTS) -> dict[str, tuple[list[int], list[float]]]:
        """Return steps and values of metrics, without gaps; neighbouring points of long curves are averaged.

        Args:
            names: Metric names; unknown ones are skipped.
            most: Maximum number of points per metric.
        """
        with self._lock:
            return {name: self._curve(name, most) for name in names if name in self._columns}

    def _curve(self, name: str, most: int) -> tuple[list[int], list[float]]:
        found = [(s, v) for s, v in zip(self.steps, self._columns[name], strict=False) if math.isfinite(v)]
        width = -(-len(found) // most) or 1
        if width > 1:
            parts = [found[i : i + width] for i in range(0, len(found), width)]
            found = [(part[-1][0], math.fsum(v for _, v in part) / len(part)) for part in parts]
        return [step for step, _ in found], [value for _, value in found]
