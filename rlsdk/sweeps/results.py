"""Results of a sweep: one row per combination of settings, over its seeds, best first, with confidence intervals."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs

from rlsdk.config import Plan
from rlsdk.errors import ConfigError, RunError
from rlsdk.options import did_you_mean
from rlsdk.plurals import counted
from rlsdk.reporting.estimates import Estimate, mean
from rlsdk.runlog.folder import replace_text
from rlsdk.sweeps.running import RunOutcome
from rlsdk.sweeps.runs import SweepRun

EVALUATED = "eval/sampled"
"""Metric for runs with held-out tasks: accuracy of the sampled answers."""
TRAINED = "reward/mean"
"""Metric for runs without held-out tasks."""
FILE = "sweep.json"


@attrs.frozen
class ResultRow:
    """A combination of settings.

    Attributes:
        group: Settings: key -> value.
        values: Seed -> value of the metric; runs without a value are omitted.
        runs: Names of the runs.
        metric: Name of the metric.
    """

    group: Mapping[str, str]
    values: Mapping[int, float]
    runs: tuple[str, ...]
    metric: str

    @property
    def estimate(self) -> Estimate | None:
        """Mean over seeds; None if there is no value."""
        return mean([*self.values.values()], self.metric) if self.values else None


@attrs.frozen
class Failure:
    """A failed run: its name, the reason, and the path of its log."""

    run: str
    reason: str
    log: Path

    def as_json(self) -> dict[str, str]:
        """Return plain JSON."""
        return {"run": self.run, "reason": self.reason, "log": str(self.log)}


def default_metric(plans: Iterable[Plan]) -> str:
    """Return the metric for comparing runs: held-out accuracy, if all of them evaluate held-out tasks."""
    sections = [plan.config.eval if plan.tasks_eval else None for plan in plans]
    return EVALUATED if all(section and (section.every or section.after) for section in sections) else TRAINED


def check_metric(plans: Mapping[str, Plan], metric: str) -> None:
    """Reject a metric of evaluations, before anything is trained, if some runs will not evaluate.

    Raises:
        ConfigError: Names the first of these runs.
    """
    if not metric.startswith("eval/"):
        return
    sections = {name: plan.config.eval for name, plan in plans.items() if plan.tasks_eval}
    evaluated = {name for name, each in sections.items() if each.every or each.before or each.after}
    silent = [name for name in plans if name not in evaluated]
    if silent:
        raise ConfigError(
            [
                f"--metric: {metric} is measured by evaluations, and {len(silent)} of {counted(len(plans), 'run')} "
                f"have none, such as {silent[0]}: give tasks.eval and eval.after, or another metric, as in "
                f"--metric {TRAINED}"
            ]
        )


def rows_of(outcomes: Sequence[RunOutcome], metric: str, *, minimize: bool = False) -> list[ResultRow]:
    """Collect the metric of each combination, best first, those without a value last."""
    groups: dict[tuple[tuple[str, str], ...], list[RunOutcome]] = {}
    for outcome in outcomes:
        groups.setdefault(tuple(outcome.run.group.items()), []).append(outcome)
    rows = []
    for group, some in groups.items():
        values = {each.run.seed: each.run.result(metric) for each in some if each.status == 0}
        found = {seed: value for seed, value in values.items() if value is not None}
        rows.append(ResultRow(dict(group), found, tuple(each.run.name for each in some), metric))
    sign = 1 if minimize else -1

    def rank(row: ResultRow) -> tuple[bool, float]:
        return row.estimate is None, sign * row.estimate.value if row.estimate else 0.0

    return sorted(rows, key=rank)


def require_metric(outcomes: Sequence[RunOutcome], metric: str) -> None:
    """Reject a metric that no finished run has, or that is finite at the end of none.

    Raises:
        RunError: No run has a value of the metric; lists the available ones.
    """
    done = [outcome.run for outcome in outcomes if outcome.status == 0]
    if not done or any(run.result(metric) is not None for run in done):
        return
    there = sorted({name for run in done for name in run.metrics()})
    if metric in there:
        raise RunError(f"--metric: {metric!r} is not finite at the end of any run")
    raise RunError(f"--metric: {_missing('no run has', metric, there)}; available: {', '.join(there)}")


def missing_metric(run: SweepRun, metric: str) -> str:
    """Return a warning if a finished run has no such metric, which may be misspelt; empty if it has."""
    there = run.metrics()
    return "" if metric in there else f"--metric: {_missing('this run does not have', metric, there)}"


def _missing(what: str, metric: str, there: Iterable[str]) -> str:
    return f"{what} {metric!r}{did_you_mean(metric, there, ', ')}"


def failures_of(outcomes: Sequence[RunOutcome]) -> list[Failure]:
    """Return the failed runs with their reasons."""
    return [Failure(each.run.name, each.run.failure(each.status), each.run.log) for each in outcomes if each.status]


def as_json(folder: Path, metric: str, rows: Sequence[ResultRow], failures: Sequence[Failure]) -> dict[str, Any]:
    """Return the results as plain values."""
    return {
        "folder": str(folder),
        "metric": metric,
        "rows": [
            {
                "settings": dict(row.group),
                **(estimate.as_json() if (estimate := row.estimate) else dict.fromkeys(("mean", "low", "high"))),
                "values": {str(seed): value for seed, value in row.values.items()},
                "runs": list(row.runs),
            }
            for row in rows
        ],
        "failed": [each.as_json() for each in failures],
    }


def write(folder: Path, results: Mapping[str, Any]) -> Path:
    """Write results as `sweep.json` into the sweep's folder."""
    file = folder / FILE
    replace_text(file, json.dumps(results, indent=2))
    return file
