"""The report at the end of a run: tables, a picture, sample answers, and the same figures as JSON."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Column, Table

from rlsdk.errors import visible
from rlsdk.plurals import counted
from rlsdk.runlog.folder import replace_text, replacing
from rlsdk.runlog.metrics import read_metrics

SUMMARY = "summary.json"
CURVES = (
    ("reward/mean", "training reward"),
    ("eval/sampled", "held-out, sampled"),
    ("eval/greedy", "held-out, greedy"),
)
"""(metric, label) of each curve in the picture."""
PHASES = {
    "start": "start",
    "produce": "sampling and scoring",
    "wait_for_rollouts": "waiting for rollouts",
    "logprobs": "logprobs before the update",
    "credit": "filters and advantages",
    "update": "updating the weights",
    "sync": "sending the weights",
    "evaluation": "evaluation",
    "checkpoints": "checkpoints",
    "whole": "total",
}
"""Phase in the summary -> its label, in the order of a run; other phases come first, under their own names."""


def write_summary(folder: Path, summary: Mapping[str, Any]) -> Path:
    """Write `summary.json`, the report for programs; return its path."""
    path = folder / SUMMARY
    replace_text(path, json.dumps(summary, indent=2) + "\n")
    return path


def draw_curves(folder: Path, title: str) -> Path | None:
    """Draw `curves.png` from the run's metrics; None if there are none, or matplotlib is not installed."""
    metrics = read_metrics(folder)
    series = [(label, [(m["step"], m[key]) for m in metrics if m.get(key) is not None]) for key, label in CURVES]
    series = [(label, points) for label, points in series if points]
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return None
    if not series:
        return None
    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.add_subplot()
    for label, points in series:
        sparse = len(points) < 30
        axes.plot(*zip(*points, strict=True), label=label, marker="o" if sparse else None, linewidth=2 if sparse else 1)
    values = [value for _, points in series for _, value in points if math.isfinite(value)]
    low, high = min(0.0, *values), max(1.0, *values)  # rewards may be negative or above 1
    margin = 0.02 * (high - low)
    axes.set(xlabel="step", ylabel="reward, accuracy", title=title, ylim=(low - margin * (low < 0), high + margin))
    axes.grid(alpha=0.3)
    axes.legend(loc="lower right")
    path = folder / "curves.png"
    with replacing(path) as partial:
        figure.savefig(partial, dpi=120, format="png")
    return path


def figure_text(figure: float | None, form: str = ".1%") -> str:
    """Format a figure for display; None, which means that nothing could be scored, becomes `n/a`."""
    return "n/a" if figure is None else format(figure, form)


def source_label(source: str) -> str:
    """Return the label of a source's row in a table whose row `all` is about the tasks of all sources."""
    return "source all" if source == "all" else source


def phase_seconds(summary: Mapping[str, Any]) -> list[tuple[str, float]]:
    """Return the label and the seconds of each phase of a run, the total last."""
    seconds, order = summary.get("seconds") or {}, list(PHASES)
    known = sorted(seconds, key=lambda name: order.index(name) if name in PHASES else -1)
    return [(PHASES.get(name, name), seconds[name]) for name in known]


def print_report(
    console: Console, summary: Mapping[str, Any], samples: Mapping[str, Sequence[Mapping[str, Any]]]
) -> None:
    """Print the report: accuracy, times, what went wrong, and sample answers."""
    before, after = summary.get("accuracy_before") or {}, summary.get("accuracy_after") or {}
    if before or after:
        table = Table(title=f"held-out accuracy of {summary['name']}, {summary.get('eval_tasks', '?')} tasks")
        for column in ("", "before", "after"):
            table.add_column(column, justify="right" if column else "left")
        for key in ("sampled", "greedy"):
            if key in before or key in after:
                table.add_row(key, *(figure_text(x[key]) if key in x else "-" for x in (before, after)))
        console.print(table)
    times = Table("phase", Column("seconds", justify="right"), title="where the time went")
    for name, value in phase_seconds(summary):
        times.add_row(name, f"{value:.1f}")
    console.print(times)
    console.print(
        f"{counted(summary['steps'], 'step')}, {summary['tokens_per_second']:,.0f} sampled tokens/s while generating",
        highlight=False,
    )
    _print_tasks(console, summary.get("tasks") or {})
    _print_invalid(console, summary.get("invalid") or {})
    _print_lost(console, summary.get("environments") or {}, summary.get("engines") or {})
    for name, outcome in (summary.get("trackers") or {}).items():
        if outcome != "ok":
            console.print(f"[yellow]tracker {_plain(name)}: {_plain(outcome)}[/]", highlight=False)
    for warning in summary.get("warnings") or ():
        console.print(f"[yellow]{_plain(warning)}[/]", highlight=False)
    for when, rows in samples.items():
        for row in rows:
            mark = {True: "right", False: "wrong", None: "not scored"}[row["correct"]]
            console.print(
                f"[bold]{when}[/]  {_plain(row['prompt'])} [dim]->[/] {_plain(row['response'])}  [dim]({mark})[/]",
                highlight=False,
            )
    for key in ("curves", "export"):
        if summary.get(key):
            console.print(f"{key}: {summary[key]}", highlight=False, soft_wrap=True)  # a path that can be copied


def _plain(text: str) -> str:
    """Escape text from a model or plugin: one line, without markup or terminal control sequences."""
    return escape(visible(text))


def _print_invalid(console: Console, invalid: Mapping[str, Any]) -> None:
    """Print the rollouts that could not be scored, if any."""
    if not invalid.get("rollouts"):
        return
    count = f"{counted(invalid['rollouts'], 'trajectory', 'trajectories')} ({invalid['share']:.1%})"
    _print_reasons(
        console,
        f"{count} could not be scored and {'was' if invalid['rollouts'] == 1 else 'were'} left out",
        [f"{count} × {reason}" for reason, count in invalid["reasons"].items()],
    )


def _print_tasks(console: Console, tasks: Mapping[str, int]) -> None:
    """Print the number of trained tasks, filtered tasks and so on, unless all were trained and none expired."""
    expired = tasks.get("expired", 0)
    if tasks.get("issued", 0) == tasks.get("trained", 0) and not expired:
        return
    words = {"returned": "unfinished when the run ended"}
    ends = ", ".join(
        f"{count:,} {words.get(name, name)}" for name, count in tasks.items() if name not in ("issued", "expired")
    )
    old = f"; {counted(expired, 'group')} expired before they could be trained" if expired else ""
    console.print(f"{counted(tasks['issued'], 'task')}: {ends}{old}", highlight=False)


def _print_lost(console: Console, environments: Mapping[str, Any], engines: Mapping[str, Any]) -> None:
    """Print which environment workers and engines died, if any did."""
    if lost := environments.get("workers_lost"):
        again = f"{counted(environments['rollouts_run_again'], 'rollout')} run again"
        _print_reasons(console, f"{counted(lost, 'environment worker')} lost; {again}", environments["reasons"])
    if lost := engines.get("lost"):
        again = f"{counted(engines['sampled_again'], 'answer')} sampled again"
        _print_reasons(console, f"{counted(lost, 'engine')} lost and replaced; {again}", engines["reasons"])


def _print_reasons(console: Console, what: str, reasons: Iterable[str]) -> None:
    console.print(f"[yellow]{what}:[/]", highlight=False)
    for reason in reasons:
        console.print(f"  {_plain(reason)}", highlight=False)
