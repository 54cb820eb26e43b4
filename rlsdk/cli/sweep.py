"""`rlsdk sweep`."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click
from rich.markup import escape
from rich.table import Column

from rlsdk.cli.lazy import INTERRUPTED
from rlsdk.cli.output import borderless, show
from rlsdk.cli.parameters import SettingsCommand, plugin_files
from rlsdk.plurals import counted
from rlsdk.reporting.estimates import Estimate
from rlsdk.sweeps.running import Failure, RunOutcome, missing_metric

if TYPE_CHECKING:
    from rlsdk.config import Plan
    from rlsdk.sweeps.runs import SweepRun


@click.command(cls=SettingsCommand)
@click.argument("config", type=click.Path(path_type=Path))
@click.argument("settings", metavar="[KEY=VALUES]...", nargs=-1)
@click.option(
    "--seeds", type=click.IntRange(1), metavar="N", default=1, show_default=True, help="Runs per combination."
)
@click.option(
    "--parallel", type=click.IntRange(1), metavar="N", default=1, show_default=True, help="Number of concurrent runs."
)
@click.option(
    "--metric", help="Metric to compare.  [default: eval/sampled or, without evaluations, reward/mean]", metavar="NAME"
)
@click.option("--minimize", is_flag=True, help="Lower values are better.")
@plugin_files
@click.option("--json", "as_json", is_flag=True, help="Print the results as JSON on standard output.")
def sweep(
    config: Path,
    settings: tuple[str, ...],
    seeds: int,
    parallel: int,
    metric: str | None,
    minimize: bool,
    files: tuple[str, ...],
    as_json: bool,
) -> None:
    """Train the YAML file CONFIG with every combination of settings, and compare the results.

    KEY=a,b,c lists values, KEY=log:1e-6:1e-3 gives 3 logarithmically spaced values, KEY=lin:0:1:5 gives 5 evenly spaced
    values; KEY=VALUE applies to all runs. Seeds count up from the configuration's.

    All combinations are checked before the first one starts. Each run has its own process, log and folder, in the
    folder NAME-sweep of `out`. Repeating the command keeps finished runs and resumes the others. The exit status is 1
    if a run failed.
    """
    from rlsdk.sweeps.running import as_json as plain
    from rlsdk.sweeps.running import check_metric, default_metric, failures_of, require_metric, rows_of, write
    from rlsdk.sweeps.runs import sweep_of

    folder, runs, plans = sweep_of(config, settings, files, seeds=seeds)
    metric = metric or default_metric(plans.values())
    check_metric(plans, metric)
    click.echo(f"{counted(len(runs), 'run')} in {folder}", err=True)
    outcomes = train_runs(folder, runs, plans, metric, parallel)
    rows, failed = rows_of(outcomes, metric, minimize=minimize), failures_of(outcomes)
    require_metric(outcomes, metric)
    found = plain(folder, metric, rows, failed)
    file = write(folder, found)
    if as_json:
        click.echo(json.dumps(found, indent=2))
    else:
        click.echo(f"{metric}: mean over seeds [95 % confidence interval]")
        keys = [Column(key, overflow="fold") for key in rows[0].group]
        table = borderless(*keys, Column("mean", justify="right"), Column("runs", justify="right"))
        for row in rows:
            estimate = escape(estimate_text(row.estimate))
            table.add_row(*row.group.values(), estimate, f"{len(row.values)}/{len(row.runs)}")
        show(table)
        click.echo(f"written: {file}")
    tell_failures(failed, len(runs))
    if failed:
        sys.exit(1)


def train_runs(
    folder: Path, runs: Sequence[SweepRun], plans: Mapping[str, Plan], metric: str, parallel: int
) -> list[RunOutcome]:
    """Train all runs of a folder, and print a line when each starts and ends; exit if interrupted."""
    from rlsdk.runlog.folder import held
    from rlsdk.sweeps.running import Interrupted, train_all

    try:
        with held(folder):
            return train_all(runs, plans, SweepLines(len(runs), metric), parallel=parallel)
    except Interrupted:
        click.echo("rlsdk: interrupted; repeat the command to continue", err=True)
        sys.exit(INTERRUPTED)


class SweepLines:
    """Prints a line when a run starts and when it ends, and once if a run has no metric to compare."""

    def __init__(self, count: int, metric: str) -> None:
        self._count, self._ended, self._metric, self._warned = count, 0, metric, False

    def __call__(self, event: str, outcome: RunOutcome) -> None:
        """Print an event of a run."""
        run = outcome.run
        if event == "waits":
            click.echo(f"{run.name}: process {outcome.process} trains it; waiting until it ends", err=True)
            return
        if event in ("begins", "continues"):
            click.echo(f"{run.name}: {event}, log {run.log}", err=True)
            return
        self._ended += 1
        took = "" if outcome.kept else f" after {outcome.seconds:.0f} s"
        reason = f": {run.failure(outcome.status)}" if event == "failed" else ""
        click.echo(f"[{self._ended}/{self._count}] {run.name}: {event}{took}{reason}", err=True)
        missing = "" if self._warned or event not in ("finished", "kept") else missing_metric(run, self._metric)
        if missing and self._ended < self._count:
            self._warned = True
            click.echo(
                f"rlsdk: warning: {missing}; if no other will, stop with Ctrl-C, and repeat the command", err=True
            )


def tell_failures(failed: Sequence[Failure], count: int) -> None:
    """List the failed runs with reasons and logs."""
    if failed:
        click.echo(f"rlsdk: {len(failed)} of {count} runs failed; repeat the command to retry them:", err=True)
    for failure in failed:
        click.echo(f"  - {failure.run}: {failure.reason} (log: {failure.log})", err=True)


def estimate_text(estimate: Estimate | None) -> str:
    """Format a value and its interval for a table."""
    if estimate is None:
        return "-"
    if estimate.low is None or estimate.high is None:
        return f"{estimate.value:.4g}"
    return f"{estimate.value:.4g}  [{estimate.low:.4g}, {estimate.high:.4g}]"
