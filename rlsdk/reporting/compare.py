"""Comparison of runs: differing settings, results per seed group with confidence intervals, the winner on each task."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import attrs
import numpy as np

from rlsdk.contracts import Series
from rlsdk.plurals import counted
from rlsdk.reporting.estimates import mean
from rlsdk.reporting.page import chart, page, table
from rlsdk.reporting.report import FinishedRun
from rlsdk.reporting.settings import comparable
from rlsdk.runlog.report import source_label

METRICS = ("reward/mean", "accuracy/mean", "eval/sampled", "eval/greedy", "rollouts/length", "time/step")
"""Metrics to compare, if a run has them."""
BY_SEED = ("name", "out", "seed", "mirror")
"""Settings that may differ within one group."""
LAST = 10
"""Number of last values of a training metric to average; of an evaluation metric, the last one counts."""


@attrs.frozen(eq=False)
class SeedGroup:
    """Runs that differ only in their seed."""

    label: str
    runs: tuple[FinishedRun, ...]

    def estimate(self, metric: str) -> dict[str, Any] | None:
        """Return mean, 95 % confidence interval over the seeds and their number; None if no run has the metric.

        A run whose last evaluation has no value counts as one without the metric: an earlier one does not replace it.
        """
        seeds: dict[Any, list[float]] = {}
        for run in self.runs:
            series, evaluated = run.history[metric], metric.startswith("eval/")
            if len(series) and not (evaluated and max(run.missing.get(metric, ()), default=-1) > series.steps[-1]):
                last = series.last(1 if evaluated else LAST)
                seeds.setdefault(run.settings.get("seed"), []).append(last.mean)
        if not seeds:
            return None
        # Runs of one seed are repetitions: they say nothing about the spread between seeds.
        found = mean([float(np.mean(repeated)) for repeated in seeds.values()], metric)
        return {**found.as_json(), "seeds": len(seeds)}

    def curve(self, metric: str) -> tuple[Series, tuple[Series, Series] | None]:
        """Return the mean over seeds at the steps they share, and minimum and maximum if there are several seeds."""
        series = [run.history[metric] for run in self.runs if len(run.history[metric])]
        if not series:
            return Series(), None
        steps = sorted(set.intersection(*(set(s.steps.tolist()) for s in series)))
        # Steps ascend; of several values at one step the last counts.
        values = np.array([s.values[s.steps.searchsorted(steps, side="right") - 1] for s in series])
        if not steps:
            return Series(), None
        band = (Series(steps, values.min(axis=0)), Series(steps, values.max(axis=0))) if len(series) > 1 else None
        return Series(steps, values.mean(axis=0)), band


def grouped(runs: Sequence[FinishedRun]) -> list[SeedGroup]:
    """Group runs that differ only in their seed."""
    found: dict[str, list[FinishedRun]] = {}
    for run, settings in zip(runs, comparable(runs), strict=True):
        rest = {path: value for path, value in settings.items() if path not in BY_SEED}
        found.setdefault(json.dumps(rest, sort_keys=True, default=str), []).append(run)
    groups: list[SeedGroup] = []
    for each in found.values():
        taken = sum(group.label.partition(" (")[0] == each[0].name for group in groups)
        groups.append(SeedGroup(f"{each[0].name} ({taken + 1})" if taken else each[0].name, tuple(each)))
    return groups


def differences(groups: Sequence[SeedGroup]) -> dict[str, dict[str, Any]]:
    """Return the settings that differ between groups: path -> label -> value; None if a run has no such setting."""
    first = comparable([group.runs[0] for group in groups])
    settings = {group.label: each for group, each in zip(groups, first, strict=True)}
    paths = sorted({path for each in settings.values() for path in each} - set(BY_SEED))
    found = {path: {label: each.get(path) for label, each in settings.items()} for path in paths}
    return {path: each for path, each in found.items() if len({json.dumps(v, default=str) for v in each.values()}) > 1}


def comparison(runs: Sequence[FinishedRun]) -> dict[str, Any]:
    """Compare runs; the result is plain JSON."""
    groups = grouped(runs)
    metrics = {}
    for metric in METRICS:
        found = {group.label: group.estimate(metric) for group in groups}
        if any(found.values()):
            metrics[metric] = {label: each for label, each in found.items() if each is not None}
    return {
        "groups": {group.label: [str(run.folder) for run in group.runs] for group in groups},
        "unfinished": {
            str(run.folder): f"{run.summary.get('status', 'training or killed')}, step {run.history.step}"
            for run in runs
            if run.summary.get("status") != "finished"
        },
        "differences": differences(groups),
        "metrics": metrics,
        "missing": {
            str(run.folder): counts
            for run in runs
            if (counts := {metric: len(run.missing[metric]) for metric in METRICS if metric in run.missing})
        },
        "winners": {task: _winner(each) for task, each in _tasks(groups).items()},
    }


def _tasks(groups: Sequence[SeedGroup]) -> dict[str, dict[str, dict[str, Any]]]:
    """Return the held-out estimates of each group, for all tasks and for each source: name -> label -> estimate."""
    names = {"all": ""} | {
        source_label(name): f"{name}/"
        for group in groups
        for run in group.runs
        for name in run.history.between("eval/", "/sampled")
    }
    found: dict[str, dict[str, dict[str, Any]]] = {}
    for task, prefix in names.items():
        for metric in (f"eval/{prefix}sampled", f"eval/{prefix}greedy"):
            held = {g.label: estimate for g in groups if (estimate := g.estimate(metric)) is not None}
            if len(held) > 1:
                found[task] = held
                break
    return found


def _winner(found: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Return the group with the highest mean, and whether its interval lies above all others."""
    best = max(found, key=lambda label: found[label]["mean"])
    low = found[best]["low"]
    others = [each["high"] for label, each in found.items() if label != best]
    clear = low is not None and all(high is not None and low > high for high in others)
    return {"run": best, "mean": found[best]["mean"], "clear": clear}


def comparison_page(runs: Sequence[FinishedRun]) -> str:
    """Return a comparison as an HTML page."""
    found, groups = comparison(runs), grouped(runs)
    charts = []
    for metric in METRICS:
        curves = {group.label: group.curve(metric) for group in groups}
        bands = {label: band for label, (_, band) in curves.items() if band is not None}
        charts.append(chart(metric, {label: mean for label, (mean, _) in curves.items()}, bands))
    labels = [group.label for group in groups]
    return page(
        f"Comparison of {len(runs)} runs",
        [
            ("Runs", table(("group", "folders"), ((k, ", ".join(v)) for k, v in found["groups"].items()))),
            ("Runs that have not finished", table(("folder", "status"), found["unfinished"].items())),
            ("Settings that differ", table(("setting", *labels), difference_rows(found))),
            ("Results", table(("metric", *labels), metric_rows(found)) + f"<p>{INTERVALS}</p>"),
            ("Values that are missing", table(("folder", "metrics"), missing_rows(found))),
            ("Winners on held-out tasks", table(("tasks", "winner", "mean", ""), winner_rows(found))),
            ("Curves", "".join(charts)),
        ],
    )


INTERVALS = (
    f"Means over the last {LAST} steps, or the last evaluation; then over seeds, with 95 % confidence intervals "
    "(Student's t). No interval means a single seed."
)


def difference_rows(found: Mapping[str, Any]) -> list[tuple[str, ...]]:
    """Return the settings that differ, as rows of texts."""
    shown = {path: each.values() for path, each in found["differences"].items()}
    return [(path, *("–" if value is None else str(value) for value in values)) for path, values in shown.items()]


def metric_rows(found: Mapping[str, Any]) -> list[tuple[str, ...]]:
    """Return the results, as rows of texts."""
    return [
        (metric, *(_shown(each.get(label)) for label in found["groups"])) for metric, each in found["metrics"].items()
    ]


def missing_rows(found: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return the number of missing values of each run, as rows of texts."""
    return [
        (folder, ", ".join(f"{metric}: {counted(count, 'value')}" for metric, count in counts.items()))
        for folder, counts in found["missing"].items()
    ]


def winner_rows(found: Mapping[str, Any]) -> list[tuple[str, ...]]:
    """Return the winners, as rows of texts."""
    return [
        (task, each["run"], f"{each['mean']:.4g}", "clear" if each["clear"] else "within chance, or one seed")
        for task, each in found["winners"].items()
    ]


def _shown(estimate: Mapping[str, Any] | None) -> str:
    if estimate is None:
        return "–"
    mean = f"{estimate['mean']:.4g}"
    return mean if estimate["low"] is None else f"{mean} [{estimate['low']:.4g}, {estimate['high']:.4g}]"
