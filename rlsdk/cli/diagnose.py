"""`rlsdk diagnose`."""

from __future__ import annotations

import json
from collections.abc import Sequence

import attrs
import click

from rlsdk.cli.parameters import RunPath
from rlsdk.errors import ConfigError


@click.command()
@click.argument("run", type=RunPath())
@click.option("--rule", "rules", multiple=True, metavar="NAME", help="Only this diagnosis; may be repeated.")
@click.option("--plugin", "plugins", multiple=True, metavar="FILE", help="A file of diagnoses of your own.")
@click.option("--json", "as_json", is_flag=True, help="Print a JSON list.")
def diagnose(run: str, rules: Sequence[str], plugins: Sequence[str], as_json: bool) -> None:
    """Say what is wrong with the run in the folder (or at the URL) RUN by its metrics, also while it trains.

    The built-in diagnoses look at the metrics of each step, with the options that the run's configuration gives them.
    Of its plugins none is executed; `--plugin mine.py --rule mine/slow` names one of yours. What was found is no
    failure of this command: its exit status is 0.
    """
    import yaml

    from rlsdk.checkpoints.reading import local_copy
    from rlsdk.runlog.alerts import chosen_rules
    from rlsdk.runlog.alerts import diagnose as diagnosed
    from rlsdk.runlog.metrics import METRICS, read_metrics

    with local_copy(run, checkpoint=False) as folder:
        if not (folder / METRICS).is_file():
            raise ConfigError([f"RUN: {run} is no folder of a run: it has no {METRICS}"])
        lines = read_metrics(folder)
        config = folder / "config.yaml"
        kept = yaml.safe_load(config.read_text(encoding="utf-8")) if config.is_file() else {}
        found = diagnosed(lines, chosen_rules(kept, rules, plugins))
    if as_json:
        click.echo(json.dumps([attrs.asdict(alert) for alert in found], indent=2))
        return
    steps = max((line["step"] for line in lines), default=0)
    if not found:
        click.echo(f"Nothing found in {steps} steps of {run}.")
    for alert in found:
        click.echo(f"step {alert.step}  {alert.level}  {alert.name}: {alert.message}\n  {alert.advice}")
