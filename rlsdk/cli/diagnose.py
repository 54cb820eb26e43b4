"""`rlsdk diagnose`."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import attrs
import click

from rlsdk.cli.parameters import RunPath
from rlsdk.errors import ArgumentError, visible
from rlsdk.plurals import counted

if TYPE_CHECKING:
    from rlsdk.contracts import History
    from rlsdk.runlog.alerts import Unjudged

HELD_OUT = ("eval/sampled", "eval/greedy")


@click.command()
@click.argument("run", type=RunPath())
@click.option("--rule", "rules", multiple=True, metavar="NAME", help="Run only this diagnosis; repeatable.")
@click.option(
    "--plugin",
    "plugins",
    multiple=True,
    metavar="FILE",
    help="Load a Python file with your own diagnoses; repeatable.",
)
@click.option("--json", "as_json", is_flag=True, help="Print a JSON list.")
def diagnose(run: str, rules: Sequence[str], plugins: Sequence[str], as_json: bool) -> None:
    """Diagnose the run in the folder (or at the URL) RUN from its metrics, also while it trains.

    The built-in diagnoses examine the metrics of each step, with the options in the run's configuration. The run's
    plugins are not executed; add your own diagnosis with `--plugin mine.py --rule mine/slow`. Diagnoses that need more
    steps than the run has are named, with what they find in shorter windows. The exit status is 0 even if problems are
    found.
    """
    from rlsdk.checkpoints.mirror import local_copy
    from rlsdk.contracts import History
    from rlsdk.runlog.alerts import chosen_rules, unjudged
    from rlsdk.runlog.alerts import diagnose as diagnosed
    from rlsdk.runlog.files import read_json, read_yaml
    from rlsdk.runlog.folder import why_no_run
    from rlsdk.runlog.metrics import METRICS, read_metrics
    from rlsdk.runlog.report import SUMMARY

    with local_copy(run, checkpoint=False) as folder:
        if not (folder / METRICS).is_file():
            raise ArgumentError([why_no_run(Path(run), METRICS)])
        lines = read_metrics(folder)
        config = folder / "config.yaml"
        kept = read_yaml(config)
        if not kept and config.is_file():
            click.echo(f"rlsdk: {run}/config.yaml is empty or damaged: diagnoses run with their defaults", err=True)
        chosen = chosen_rules(kept, rules, plugins)
        found = diagnosed(lines, chosen)
        summary = read_json(folder / SUMMARY)
    history = History.of(lines)
    short = unjudged(history, chosen)
    if isinstance(summary, dict) and summary.get("status") == "failed":
        error = visible(str(summary.get("error")), keep="\n")
        click.echo(f"The run failed: {error}", err=as_json)
    if as_json:
        click.echo(json.dumps([attrs.asdict(alert) for alert in found], indent=2))
    else:
        steps = max((line["step"] for line in lines), default=0)
        if not found:
            click.echo(f"Nothing found in {counted(steps, 'step')} of {run}.")
        for alert in found:
            click.echo(f"step {alert.step}  {alert.level}  {alert.name}: {alert.message}\n  {alert.advice}")
    if short:
        _show_unjudged(history, short, err=as_json)


def _show_unjudged(history: History, short: Sequence[Unjudged], *, err: bool) -> None:
    """Print which diagnoses need more steps than the run has, and what its few steps show nevertheless."""
    names = ", ".join(f"{each.name} ({each.values} of {each.needed})" for each in short)
    click.echo(f"Too few values of a metric to judge: {names}.", err=err)
    for each in short:
        if each.finding is not None:
            told = f"{each.name}, with window={each.window}: {each.finding.message}"
            click.echo(f"step {history.step}  {each.finding.level}  {told}\n  {each.finding.advice}", err=err)
    ends = {name: history[name].values for name in ("reward/mean", "accuracy/mean", *HELD_OUT)}
    shown = ", ".join(f"{name} {values[0]:.3g} → {values[-1]:.3g}" for name, values in ends.items() if len(values) > 1)
    if shown:
        click.echo(f"First and last values: {shown}", err=err)
