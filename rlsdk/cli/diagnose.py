"""`rlsdk diagnose`."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import attrs
import click

from rlsdk.cli.parameters import RunPath
from rlsdk.errors import ConfigError
from rlsdk.plurals import counted


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
    plugins are not executed; add your own diagnosis with `--plugin mine.py --rule mine/slow`. The exit status is 0 even
    if problems are found.
    """
    import yaml

    from rlsdk.checkpoints.reading import local_copy
    from rlsdk.runlog.alerts import chosen_rules
    from rlsdk.runlog.alerts import diagnose as diagnosed
    from rlsdk.runlog.folder import why_no_run
    from rlsdk.runlog.metrics import METRICS, read_metrics

    with local_copy(run, checkpoint=False) as folder:
        if not (folder / METRICS).is_file():
            raise ConfigError([f"RUN: {why_no_run(Path(run), METRICS)}"])
        lines = read_metrics(folder)
        config = folder / "config.yaml"
        kept = yaml.safe_load(config.read_text(encoding="utf-8")) if config.is_file() else {}
        if not isinstance(kept, dict):
            click.echo(f"rlsdk: {run}/config.yaml is empty or damaged: diagnoses run with their defaults", err=True)
            kept = {}
        found = diagnosed(lines, chosen_rules(kept, rules, plugins))
    if as_json:
        click.echo(json.dumps([attrs.asdict(alert) for alert in found], indent=2))
        return
    steps = max((line["step"] for line in lines), default=0)
    if not found:
        click.echo(f"Nothing found in {counted(steps, 'step')} of {run}.")
    for alert in found:
        click.echo(f"step {alert.step}  {alert.level}  {alert.name}: {alert.message}\n  {alert.advice}")
