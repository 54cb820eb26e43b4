"""Runs shown by the viewer: settings, state, metrics, tasks, processes and alerts, read from their folders."""

from __future__ import annotations

import hashlib
import json
import math
import os
import threading
import time
from array import array
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import attrs

from rlsdk.annotations import AnnotationFile
from rlsdk.config.tree import spelled_out
from rlsdk.contracts import History, Series
from rlsdk.errors import RunError, ValueFault
from rlsdk.runlog import actors
from rlsdk.runlog.actors import STATUS
from rlsdk.runlog.alerts import ALERTS, Alert, alert_from, chosen_rules, latest_alerts
from rlsdk.runlog.files import json_lines, read_json, read_yaml, tail
from rlsdk.runlog.folder import MARKER, why_no_run
from rlsdk.runlog.metrics import METRICS, read_ledger
from rlsdk.viewer.conversation import Vocabulary
from rlsdk.viewer.rollouts import Browser

SEED_KEYS = ("name", "seed", "out", "mirror")
"""Settings that may differ between repetitions of one experiment."""
QUIET_SECONDS = 120.0
"""Seconds without a step after which an unfinished run counts as quiet, if its steps are much shorter."""
_HEADLINES = ("reward/mean", "accuracy/mean", "eval/greedy", "eval/sampled", "time/step", "time/tokens_per_second")
MOST_RUNS = 200
"""Maximum number of runs; the newest are shown."""
POINTS = 2000
"""Maximum number of points per curve; longer curves are thinned out."""
_CHUNK = 2**20
_KEPT = 4096
"""Number of bytes before the read position that must be unchanged."""
_GAP = math.nan


class RunFolder:
    """One run; files are re-read when they change."""

    def __init__(self, path: Path, shown: str = "") -> None:
        self.path = path
        self.shown = shown or str(path)
        self.id = hashlib.sha256(self.shown.encode()).hexdigest()[:10]
        self.metrics = MetricTable(path)
        self.browser = Browser(path)
        self.annotations = AnnotationFile(path)
        self._read: dict[str, tuple[float, Any]] = {}
        self._standing: tuple[tuple[int, ...], list[dict[str, Any]]] | None = None

    @cached_property
    def vocabulary(self) -> Vocabulary:
        """Texts of the tokens of the run's model."""
        return Vocabulary.of(self.path)

    def _file(self, name: str, read: Any) -> Any:
        """Read a file of the folder, unless it is unchanged since it was last read."""
        path = self.path / name
        try:
            changed = path.stat().st_mtime
        except OSError:
            return None
        kept = self._read.get(name)
        if kept is None or kept[0] != changed:
            self._read[name] = kept = (changed, read(path))
        return kept[1]

    @property
    def config(self) -> dict[str, Any]:
        """Settings of the run."""
        return self._file("config.yaml", read_yaml) or {}

    @property
    def summary(self) -> dict[str, Any]:
        """Summary of a finished run; empty before."""
        found = self._file("summary.json", read_json)
        return found if isinstance(found, dict) else {}

    @property
    def alerts(self) -> list[Alert]:
        """Alerts raised by the run's rules, oldest first."""
        lines = self._file(ALERTS, lambda path: json_lines(path, 500)) or []
        return [alert for line in lines if (alert := alert_from(line)) is not None]

    def standing(self) -> list[dict[str, Any]]:
        """Return the findings about a run: its alerts, and results of the built-in diagnoses at its last step."""
        self.metrics.refresh()
        alerts, kept = self.alerts, self._standing
        key = (self.metrics.generation, len(self.metrics.steps), len(alerts))
        if kept is None or kept[0] != key:
            rules = {} if self.config.get("diagnoses") == [] else chosen_rules(self.config)
            found = latest_alerts(self.metrics.history(), alerts, rules)
            self._standing = kept = (key, [attrs.asdict(each) for each in found])
        return kept[1]

    @property
    def experiment(self) -> str:
        """Key that is equal for runs whose settings differ only in name, folder and seed."""
        settings = {key: value for key, value in spelled_out(self.config).items() if key not in SEED_KEYS}
        return hashlib.sha256(repr(sorted(settings.items())).encode()).hexdigest()[:10]

    def state(self) -> dict[str, Any]:
        """Return the run's data for the page header."""
        self.metrics.refresh()
        config, steps = self.config, self.metrics.steps
        status, trouble = self._status()
        return {
            "id": self.id,
            "name": str(config.get("name") or self.path.name),
            "path": self.shown,
            "seed": config.get("seed"),
            "experiment": self.experiment,
            "status": status,
            "trouble": trouble,
            "step": steps[-1] if steps else 0,
            "steps": config.get("steps"),
            "age": round(max(time.time() - self.metrics.changed, 0.0), 1) if self.metrics.changed else None,
            "generation": self.metrics.generation,
            "rows": len(steps),
            "alerts": len(self.alerts),
            "stored": self.browser.address is not None,
            "last": {name: self.metrics.last(name) for name in _HEADLINES},
        }

    def _status(self) -> tuple[str, str]:
        """Return the state of the run in one word, and a sentence if something is wrong."""
        engines = self._file(STATUS, read_json)
        summary = self.summary
        ended = str((isinstance(engines, dict) and engines.get("ended")) or summary.get("status") or "")
        if ended:
            return ended, str(summary.get("error") or "")
        known = actors.read(self.path)
        driver = known.process("driver") if known else None
        if driver is not None and driver.is_gone:
            return "killed", f"its process {driver.pid} on {driver.host} is gone and left no exit status"
        silent = next((each for each in known.actors if each.silent), None) if known else None
        trouble = f"{silent.name} {silent.silent}, for {_span(silent.silent_for)}; see its log" if silent else ""
        if not self.metrics.changed:
            return "starting", trouble
        age, usual = time.time() - self.metrics.changed, self.metrics.last("time/step") or 0.0
        if age > max(QUIET_SECONDS, 10 * usual):
            return (
                "quiet",
                trouble or f"no step for {_span(age)}; a step usually takes {_span(usual)}. Look at the processes",
            )
        return "running", trouble

    def ledger(self) -> dict[str, Any]:
        """Return the outcomes of the tasks of each source by step, and the totals of a finished run."""
        return {"tasks": self.summary.get("tasks") or {}, "steps": read_ledger(self.path)}

    def processes(self) -> dict[str, Any]:
        """Return the processes of the run, with their log files, and the state of its engines."""
        logs = sorted(self.path.glob("logs/*.log"))
        now = time.time()
        found = [{"name": p.stem, "size": p.stat().st_size, "age": round(now - p.stat().st_mtime, 1)} for p in logs]
        known = actors.read(self.path)
        return {
            "logs": found,
            "actors": known.as_json(now) if known else [],
            "written": round(now - known.written, 1) if known else None,
            "stage": known.stage if known else "",
            "engines": self._file(STATUS, read_json),
        }

    def log(self, name: str, after: int | None) -> dict[str, Any]:
        """Return the tail of a log file, after the position up to which the reader has it.

        Raises:
            ValueFault: There is no such log.
        """
        names = {path.stem: path for path in self.path.glob("logs/*.log")}
        if name not in names:
            raise ValueFault(f"there is no log {name!r}; there are: {', '.join(sorted(names)) or 'none'}")
        return tail(names[name], after=after)


def _span(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.3g} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


def is_run(path: Path) -> bool:
    """Return whether a folder is a run folder."""
    return any((path / name).is_file() for name in (MARKER, METRICS, "config.yaml", "summary.json"))


def find_runs(given: Sequence[Path], *, required: bool = True) -> list[Path]:
    """Return the newest run folders: those given, and those directly below given folders that are not runs themselves.

    Unless required, folders that do not exist or hold no run yet are skipped.

    Raises:
        RunError: A folder does not exist, or holds no run.
    """
    found: list[Path] = []
    for path in given:
        if is_run(path):
            found.append(path)
            continue
        if not path.is_dir():
            if not required:
                continue
            raise RunError(why_no_run(path, MARKER))
        below = [each for each in path.iterdir() if each.is_dir() and not each.name.startswith(".") and is_run(each)]
        if not below and required:
            raise RunError(
                f"{path} is not a run's folder and holds none; expected a folder with a config.yaml or metrics.jsonl, "
                "as `rlsdk train` creates it"
            )
        found += below
    unique = list({path.resolve(): path for path in found}.values())
    return sorted(unique, key=_changed, reverse=True)[:MOST_RUNS]


def _changed(path: Path) -> float:
    return max((f.stat().st_mtime for f in (path / METRICS, path / "config.yaml") if f.is_file()), default=0.0)


def finite(value: Any) -> Any:
    """Replace non-finite numbers by null in nested lists and mappings."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: finite(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [finite(each) for each in value]
    return value


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
            if state is None or state.st_size < self._offset or self._is_rewritten():
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

    def _is_rewritten(self) -> bool:
        """Return True if the data read last has changed, as when a run starts over or is resumed."""
        with self._path.open("rb") as file:
            file.seek(self._offset - len(self._seen))
            return file.read(len(self._seen)) != self._seen

    def _take(self, chunk: bytes) -> None:
        self._seen = (self._seen + chunk)[-_KEPT:]
        *lines, self._rest = (self._rest + chunk).split(b"\n")
        for line in lines:
            try:
                content = json.loads(line)
                if not isinstance(content, dict) or type(content.get("step")) is not int:
                    continue
                values = {n: float(v) for n, v in content.items() if n != "step" and isinstance(v, int | float)}
                self.steps.append(content["step"])
            except (ValueError, RecursionError, OverflowError):  # a damaged line, or a number too large
                continue
            for name, value in values.items():
                column = self._columns.setdefault(name, array("d"))
                column.extend([_GAP] * (len(self.steps) - 1 - len(column)))
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

    def points(self, names: Iterable[str]) -> dict[str, tuple[list[int], list[float]]]:
        """Return steps and values of known metrics, without gaps; neighbouring points of long curves are averaged."""
        with self._lock:
            return {name: self._curve(name, POINTS) for name in names if name in self._columns}

    def _curve(self, name: str, most: int) -> tuple[list[int], list[float]]:
        found = [(s, v) for s, v in zip(self.steps, self._columns[name], strict=False) if math.isfinite(v)]
        width = -(-len(found) // most) or 1
        if width > 1:
            parts = [found[i : i + width] for i in range(0, len(found), width)]
            found = [(part[-1][0], math.fsum(v for _, v in part) / len(part)) for part in parts]
        return [step for step, _ in found], [value for _, value in found]
