"""`rlsdk tournament`."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import click
from rich.markup import escape
from rich.table import Column

from rlsdk.cli.output import borderless, show
from rlsdk.cli.parameters import SettingsCommand, plugin_files
from rlsdk.cli.sweep import estimate_text, tell_failures, train_runs
from rlsdk.plurals import counted
from rlsdk.sweeps.running import EVALUATED


@click.command(cls=SettingsCommand)
@click.argument("entries", metavar="ALGORITHM... [KEY=VALUE]...", nargs=-1, required=True)
@click.option(
    "--suite", default="nano", show_default=True, metavar="NAME", help="Tasks: a suite, or a folder of YAML files."
)
@click.option(
    "--seeds", type=click.IntRange(1), metavar="N", default=3, show_default=True, help="Runs per algorithm and task."
)
@click.option(
    "--parallel", type=click.IntRange(1), metavar="N", default=1, show_default=True, help="Number of concurrent runs."
)
@click.option(
    "--metric", default=EVALUATED, show_default=True, metavar="NAME", help="Metric that scores a run; higher is better."
)
@click.option(
    "--out",
    type=click.Path(path_type=Path),
    metavar="DIR",
    help="Folder of all runs.  [default: runs/tournament-SUITE]",
)
@plugin_files
@click.option("--json", "as_json", is_flag=True, help="Print the results as JSON on standard output.")
def tournament(
    entries: tuple[str, ...],
    suite: str,
    seeds: int,
    parallel: int,
    metric: str,
    out: Path | None,
    files: tuple[str, ...],
    as_json: bool,
) -> None:
    """Train with each ALGORITHM on every task of a suite, with several seeds, and rank them.

    An algorithm is a name such as grpo or mylab/msoft, or a mapping with options: '{use: grpo, kl_coef: 0.0}'. Each
    keeps its own defaults; all else comes from the suite's files and settings KEY=VALUE.

    The ranking is by the interquartile mean over tasks and seeds, with a 95 % confidence interval by stratified
    bootstrap (arXiv:2108.13264). Repeating the command keeps finished runs and resumes the others. The exit status is 1
    if a run failed.
    """
    from rlsdk.sweeps import tournament as room
    from rlsdk.sweeps.running import check_metric, failures_of, require_metric, write
    from rlsdk.sweeps.tournament import suite_tasks

    algorithms, settings = room.parted(entries)
    tasks = suite_tasks(suite)
    folder = out or Path("runs") / f"tournament-{Path(suite).name}"
    runs, plans = room.tournament_of(algorithms, tasks, folder, settings=settings, plugins=files, seeds=seeds)
    check_metric(plans, metric)
    click.echo(
        f"{counted(len(algorithms), 'algorithm')} × {counted(len(tasks), 'task')} × {counted(seeds, 'seed')}: "
        f"{counted(len(runs), 'run')} in {folder}",
        err=True,
    )
    if len(algorithms) == 1:
        click.echo(f"nothing to compare: {algorithms[0]} is the only algorithm; name others after it", err=True)
    outcomes = train_runs(folder, runs, plans, metric, parallel)
    require_metric(outcomes, metric)
    ranking, failed = room.standings(outcomes, metric), failures_of(outcomes)
    found = room.as_json(suite, metric, seeds, ranking, failed)
    file = write(folder, found)
    if as_json:
        click.echo(json.dumps(found, indent=2))
    else:
        about = "interquartile mean over tasks and seeds; mean over seeds for each task [95 % interval]"
        click.echo(f"{metric}: {about}")
        columns = [Column(task, justify="right", overflow="fold") for task in tasks]
        table = borderless(Column("algorithm", overflow="fold"), Column("all tasks", justify="right"), *columns)
        for each in ranking:
            missing = f" ({counted(len(each.missing), 'run')} missing)" if each.missing else ""
            cells = [escape(estimate_text(estimate)) for estimate in (each.whole, *map(each.task, tasks))]
            table.add_row(escape(each.algorithm) + missing, *cells)
        show(table)
        click.echo(f"written: {file}")
    tell_failures(failed, len(runs))
    if failed:
        sys.exit(1)
