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


class Standing(Protocol):
    """Progress of a task source: group counts since the run began; `available` and `scheduled` are current counts."""

    @property
    def target(self) -> int:
        """Asked for."""
        ...

    @property
    def available(self) -> int:
        """There, and not yet taken."""
        ...

    @property
    def scheduled(self) -> int:
        """Groups in flight."""
        ...

    @property
    def filtered(self) -> int:
        """Left out by filters."""
        ...

    @property
    def expired(self) -> int:
        """Too old when they came."""
        ...


Standings = Callable[[], Mapping[str, Standing]]


def source_lines(standings: Mapping[str, Standing]) -> list[str]:
    """A line for each source of tasks."""
    width = max(map(len, standings), default=0)
    return [
        f"{name:{width}}  target {s.target:,}  available {s.available:,}  in flight {s.scheduled:,}"
        f"  filtered {s.filtered:,}  stale {s.expired:,}"
        for name, s in standings.items()
    ]


class _Live(Progress):
    """A bar, and below it a line for each source as it stands whenever the screen is drawn."""

    standings: Standings = staticmethod(dict)

    def get_renderables(self) -> Iterable[RenderableType]:
        yield from super().get_renderables()
        yield from (Text(line, style="dim") for line in source_lines(self.standings()))


class ProgressLine:
    """A bar in a terminal; elsewhere a line now and then, so that a log file stays readable."""

    def __init__(self, console: Console, total: int, done: int, every: int, standings: Standings = dict) -> None:
        """Start the display.

        Args:
            console: Console to print to.
            total: Number of steps of the run.
            done: Number of steps already completed.
            every: Steps between lines when there is no terminal.
            standings: Progress of each task source; in a terminal, a thread calls it several times a second.
        """
        self._standings = standings
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
            live.standings = standings
            live.start()
            self._bar = self._progress.add_task("step", total=total, completed=done, shown="")

    def update(self, step: int, metrics: Mapping[str, float]) -> None:
        """Show a step."""
        shown = "  ".join(f"{label} {form.format(metrics[key])}" for label, key, form in SHOWN if key in metrics)
        if self._progress is not None:
            self._progress.update(self._bar, completed=step, shown=shown)
        elif step % self._every == 0 or step == self._total:
            pace = (time.monotonic() - self._began) / max(step - self._first, 1)
            left = timedelta(seconds=round(pace * (self._total - step)))
            parts = (f"step {step}/{self._total}", shown, f"left {left}")
            lines = ["  ".join(filter(None, parts)), *(f"  {line}" for line in source_lines(self._standings()))]
            self._console.print("\n".join(lines), highlight=False, markup=False, soft_wrap=True)

    def note(self, text: str) -> None:
        """Print a line above the bar."""
        self._console.print(text, highlight=False)

    def close(self) -> None:
        """Leave the terminal as it was."""
        if self._progress is not None:
            self._progress.stop()


def log_console(**options: Any) -> Console:
    """The console that everything for people is printed on: standard error, so that standard output stays for data."""
    return Console(stderr=True, **options)
