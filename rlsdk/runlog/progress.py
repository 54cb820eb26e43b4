"""Progress display of a running training."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from datetime import timedelta
from typing import Any, Protocol

from rich.console import Console, RenderableType
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.text import Text

SHOWN = (
    ("reward", "reward/mean", "{:.3f}"),
    ("accuracy", "accuracy/mean", "{:.1%}"),
    ("loss", "actor/loss", "{:.4f}"),
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
        """Groups that filters left out."""
        ...

    @property
    def expired(self) -> int:
        """Groups that were too old when the trainer took them."""
        ...


ProgressSource = Callable[[], Mapping[str, SourceProgress]]


def source_lines(sources: Mapping[str, SourceProgress]) -> list[str]:
    """Return one line of counts for each task source."""
    width = max(map(len, sources), default=0)
    return [
        f"{name:{width}}  target {s.target:,}  available {s.available:,}  in flight {s.scheduled:,}"
        f"  filtered {s.filtered:,}  stale {s.expired:,}"
        for name, s in sources.items()
    ]


class _Live(Progress):
    """A bar, and below it one line for each task source, read again whenever the screen is drawn."""

    sources: ProgressSource = staticmethod(dict)

    def get_renderables(self) -> Iterable[RenderableType]:
        yield from super().get_renderables()
        yield from (Text(line, style="dim") for line in source_lines(self.sources()))


class ProgressLine:
    """Shows a bar in a terminal, and elsewhere a line every few steps, so that log files stay readable."""

    def __init__(self, console: Console, total: int, done: int, every: int, sources: ProgressSource = dict) -> None:
        """Start the display.

        Args:
            console: Console to print to.
            total: Number of steps of the run.
            done: Number of steps already completed.
            every: Steps between lines when there is no terminal.
            sources: Returns the progress of each task source; in a terminal, a thread calls it several times a second.
        """
        self._sources = sources
        self._console, self._total, self._every = console, total, max(every, 1)
        self._began, self._first = time.monotonic(), done
        self._progress: _Live | None = None
        if console.is_terminal:
            columns = (
                TextColumn("step"),
                MofNCompleteColumn(),
                BarColumn(bar_width=30),
                TextColumn("{task.fields[shown]}"),
                TimeElapsedColumn(),
                TextColumn("left"),
                TimeRemainingColumn(),
            )
            self._progress = live = _Live(*columns, console=console)
            live.sources = sources
            live.start()
            self._bar = self._progress.add_task("step", total=total, completed=done, shown="")

    def update(self, step: int, metrics: Mapping[str, float]) -> None:
        """Show the metrics of a step."""
        shown = "  ".join(f"{label} {form.format(metrics[key])}" for label, key, form in SHOWN if key in metrics)
        if self._progress is not None:
            self._progress.update(self._bar, completed=step, shown=shown)
        elif step % self._every == 0 or step == self._total:
            pace = (time.monotonic() - self._began) / max(step - self._first, 1)
            left = timedelta(seconds=round(pace * (self._total - step)))
            parts = (f"step {step}/{self._total}", shown, f"left {left}")
            lines = ["  ".join(filter(None, parts)), *(f"  {line}" for line in source_lines(self._sources()))]
            self._console.print("\n".join(lines), highlight=False, markup=False, soft_wrap=True)

    def note(self, text: str) -> None:
        """Print a line above the bar."""
        self._console.print(text, highlight=False)

    def close(self) -> None:
        """Stop drawing, and restore the terminal."""
        if self._progress is not None:
            self._progress.stop()


def log_console(**options: Any) -> Console:
    """Return a console on standard error, which all text for people goes to; standard output is left for data."""
    return Console(stderr=True, **options)
