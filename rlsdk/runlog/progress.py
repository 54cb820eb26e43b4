"""What a person sees of a running training."""

from __future__ import annotations

import time
from collections.abc import Mapping
from datetime import timedelta
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

SHOWN = (
    ("reward", "reward/mean", "{:.3f}"),
    ("accuracy", "accuracy/mean", "{:.1%}"),
    ("loss", "actor/loss", "{:.4f}"),
    ("tokens/s", "time/tokens_per_second", "{:,.0f}"),
)
"""(label, metric, format) of the progress line."""


class ProgressLine:
    """A bar in a terminal; elsewhere a line now and then, so that a log file stays readable."""

    def __init__(self, console: Console, total: int, done: int, every: int) -> None:
        """Start.

        Args:
            console: Where to.
            total: Steps of the run.
            done: Steps done before.
            every: Steps between lines where there is no terminal.
        """
        self._console, self._total, self._every = console, total, max(every, 1)
        self._began, self._first = time.monotonic(), done
        self._progress: Progress | None = None
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
            self._progress = Progress(*columns, console=console)
            self._progress.start()
            self._bar = self._progress.add_task("step", total=total, completed=done, shown="")

    def update(self, step: int, metrics: Mapping[str, float]) -> None:
        """Show a step."""
        shown = "  ".join(f"{label} {form.format(metrics[key])}" for label, key, form in SHOWN if key in metrics)
        if self._progress is not None:
            self._progress.update(self._bar, completed=step, shown=shown)
        elif step % self._every == 0 or step == self._total:
            parts = (f"step {step}/{self._total}", shown, f"left {self._left(step)}")
            self._console.print("  ".join(filter(None, parts)), highlight=False)

    def _left(self, step: int) -> str:
        """Time left, at the pace of the steps so far."""
        pace = (time.monotonic() - self._began) / max(step - self._first, 1)
        return str(timedelta(seconds=round(pace * (self._total - step))))

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
