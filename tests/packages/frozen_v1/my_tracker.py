"""A plugin of rlsdk in one file."""

from __future__ import annotations

import csv
from collections.abc import Mapping
from pathlib import Path

import attrs
import rlsdk
from rlsdk.contracts import Run


@rlsdk.tracker("my_tracker")
@attrs.define(kw_only=True)
class MyTracker:
    """Metrics as a CSV file in the run's folder: step, name, value.

    Attributes:
        file: Name of the file.
    """

    file: str = "my_tracker.csv"
    _path: Path | None = attrs.field(init=False, default=None)

    def open(self, run: Run) -> None:
        """Begin, or continue a run that is resumed."""
        self._path = run.folder / self.file

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Append the metrics of a step."""
        if self._path is None:
            raise RuntimeError("log() is called after open()")
        with self._path.open("a", newline="", encoding="utf-8") as file:
            csv.writer(file).writerows((step, name, value) for name, value in metrics.items())

    def close(self) -> None:
        """End; every step was written when it was logged."""
