"""Destinations of the package's own log, and the progress display of a running training."""

from __future__ import annotations

import json
import logging
import os
import platform
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import IO, Any, Protocol

from rich.console import Console, RenderableType
from rich.logging import RichHandler
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    Task,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.text import Text

from rlsdk.config import Plan
from rlsdk.isolation.process_settings import reopen_streams
from rlsdk.plugins import version

log = logging.getLogger(__name__)


class _LogFile(logging.FileHandler):
    """Log file that may become unwritable; the other handlers report this once, and the run continues."""

    _reported = False

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802 - a name of `logging`
        """Log the first error of the file system; without this, each record would print a stack trace."""
        error = sys.exc_info()[1]
        if not isinstance(error, OSError):
            super().handleError(record)
        elif not self._reported:
            self._reported = True
            log.warning("%s cannot be written: %s", self.baseFilename, error.strerror)

    def close(self) -> None:
        """Close the file; records that did not fit on the disk are lost."""
        with suppress(OSError):
            super().close()


class _ConsoleHandler(logging.StreamHandler[Any]):
    """Writes to the current file of a console, which changes if standard error is closed and opened again."""

    def __init__(self, console: Console) -> None:
        self._console = console
        super().__init__(console.file)

    @property
    def stream(self) -> Any:
        """File of the console."""
        return self._console.file

    @stream.setter
    def stream(self, given: Any) -> None:
        """Ignore the file that the base class sets."""


def _handler(console: Console) -> logging.Handler:
    """Return a handler that wraps records in a terminal, and otherwise writes one line per record, for grep."""
    if console.is_terminal:
        return RichHandler(console=console, show_path=False)
    handler = _ConsoleHandler(console)
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s", "%Y-%m-%d %H:%M:%S"))
    return handler


def log_to(plan: Plan, console: Console | logging.Handler, file: str = "") -> None:
    """Send the package's log to a console, at the config's level, and in full to a file that begins with the settings.

    Args:
        plan: The plan.
        console: Console for the user, or a handler in its place.
        file: Name of the file in the run's folder `logs`; empty for none.
    """
    root = logging.getLogger("rlsdk")
    root.setLevel(logging.DEBUG)
    root.propagate = False
    for handler in list(root.handlers):
        root.removeHandler(handler)
        if isinstance(handler, _LogFile):  # from an earlier run in this process
            handler.close()
    shown = _handler(console) if isinstance(console, Console) else console
    shown.setLevel(plan.config.log_level.upper())
    root.addHandler(shown)
    if file:
        kept = _LogFile(plan.folder / "logs" / file, encoding="utf-8")
        kept.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
        root.addHandler(kept)
        log.debug("rlsdk %s: run %r in %s", version(), plan.config.name, plan.folder)
        log.debug("process %d on %s", os.getpid(), platform.node())
        log.debug("settings: %s", json.dumps(plan.tree, default=str))


SHOWN = (
    ("reward", "reward/mean", "{:z.3f}"),
    ("accuracy", "accuracy/mean", "{:.1%}"),
    ("loss", "actor/loss", "{:z.4f}"),
    ("tokens/s", "time/tokens_per_second", "{:,.0f}"),
)
"""(label, metric, format) of the progress line."""


class SourceProgress(Protocol):
    """Counts of the groups of one task source: `available` and `scheduled` now, the others since the run began."""

    @property
    def target(self) -> int:
        """Groups that the trainer requested."""
        ...

    @property
    def available(self) -> int:
        """Groups that are complete and wait for the trainer."""
        ...

    @property
    def scheduled(self) -> int:
        """Groups that are being sampled."""
        ...

    @property
    def filtered(self) -> int:
        """Groups that filters dropped."""
        ...

    @property
    def expired(self) -> int:
        """Groups that were too old when the trainer took them."""
        ...


ProgressSource = Callable[[], Mapping[str, SourceProgress]]


def source_counts(sources: Mapping[str, SourceProgress]) -> dict[str, str]:
    """Return the nonzero counts of each task source; sources without any are left out."""
    counts = {
        name: {"available": s.available, "in flight": s.scheduled, "filtered": s.filtered, "stale": s.expired}
        for name, s in sources.items()
    }
    texts = {
        name: "  ".join(f"{label} {count:,}" for label, count in each.items() if count) for name, each in counts.items()
    }
    return {name: text for name, text in texts.items() if text}


def fitting(parts: Sequence[str], room: int) -> str:
    """Join as many leading parts as fit into a number of columns."""
    shown = ""
    for part in parts:
        longer = f"{shown}  {part}" if shown else part
        if len(longer) > room:
            break
        shown = longer
    return shown


class _Live(Progress):
    """A bar with one line per task source below it, whose counts are read at every redraw."""

    sources: ProgressSource = staticmethod(dict)

    def get_renderables(self) -> Iterable[RenderableType]:
        yield from super().get_renderables()
        counts = source_counts(self.sources())
        width = max(map(len, counts), default=0)
        for name, text in counts.items():
            yield Text(f"{name:{width}}  {text}", style="dim", no_wrap=True, overflow="ellipsis")


class _Metrics(ProgressColumn):
    """The metrics of the last step, as many as fit next to step and time, which are always shown."""

    def __init__(self, console: Console, total: int) -> None:
        super().__init__()
        self._console = console
        self._fixed = len(f"step {total}/{total} ") + len(" 0:00:00 left 0:00:00")

    def render(self, task: Task) -> Text:
        """Return the text for the current width of the terminal."""
        room = self._console.width - self._fixed - bar_width(self._console.width)
        return Text(fitting(task.fields["shown"], room), no_wrap=True)


def bar_width(columns: int) -> int:
    """Return the width of the bar in a terminal with this number of columns."""
    return 20 if columns >= 120 else 10 if columns >= 80 else 4


class ProgressLine:
    """A bar in a terminal; elsewhere one line per step, for log files."""

    def __init__(self, console: Console, total: int, done: int, sources: ProgressSource = dict) -> None:
        """Start the display.

        Args:
            console: Console to print to.
            total: Number of steps of the run.
            done: Number of steps already completed.
            sources: Returns the progress of each task source; in a terminal, a thread calls it several times a second.
        """
        self._sources = sources
        self._console, self._total = console, total
        self._began, self._first = time.monotonic(), done
        self._progress: _Live | None = None
        if console.is_terminal:
            columns = (
                TextColumn("step"),
                MofNCompleteColumn(),
                BarColumn(bar_width=bar_width(console.width)),
                _Metrics(console, total),
                TimeElapsedColumn(),
                TextColumn("left"),
                TimeRemainingColumn(),
            )
            self._progress = live = _Live(*columns, console=console)
            live.sources = sources
            live.start()
            self._bar = self._progress.add_task("step", total=total, completed=done, shown=())

    def update(self, step: int, metrics: Mapping[str, float]) -> None:
        """Show a step."""
        shown = [f"{label} {form.format(metrics[key])}" for label, key, form in SHOWN if key in metrics]
        if self._progress is not None:
            self._progress.update(self._bar, completed=step, shown=shown)
        else:
            seconds_per_step = (time.monotonic() - self._began) / max(step - self._first, 1)
            left = timedelta(seconds=round(seconds_per_step * (self._total - step)))
            sources = self._sources()
            counts = source_counts(sources)
            per_source = counts.values() if len(sources) == 1 else (f"{name}: {text}" for name, text in counts.items())
            parts = (f"step {step}/{self._total}", *shown, f"left {left}", *per_source)
            self._console.print("  ".join(parts), highlight=False, markup=False, soft_wrap=True)

    def note(self, text: str) -> None:
        """Print a line above the bar."""
        self._console.print(text, highlight=False)

    def close(self) -> None:
        """Stop drawing, and restore the terminal."""
        if self._progress is not None:
            self._progress.stop()


class _LogConsole(Console):
    """Console whose output may be gone, such as a closed terminal or a `tee` that Ctrl-C ended; the run continues."""

    @property
    def file(self) -> IO[str]:
        """File that is written to; standard error is opened again if code of a plugin has closed it."""
        reopen_streams()
        return super().file

    @file.setter
    def file(self, given: IO[str]) -> None:
        """Write to another file."""
        self._file = given

    def on_broken_pipe(self) -> None:
        """Print nothing more; rich would exit."""
        self.quiet = True
        log.warning("standard error is closed; the run continues, and its log is in its folder")

    def __exit__(self, *error: object) -> None:
        """Print, ignoring a full disk or a closed terminal."""
        with suppress(OSError):
            super().__exit__(*error)


def log_console(**options: Any) -> Console:
    """Return a console on standard error, for all human-readable text; standard output is for data."""
    return _LogConsole(stderr=True, **options)
