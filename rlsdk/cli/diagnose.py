"""`rlsdk diagnose`."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

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
    from rlsdk.checkpoints.reading import local_copy
    from rlsdk.runlog.alerts import diagnose as diagnosed
    from rlsdk.runlog.metrics import METRICS, read_metrics

    with local_copy(run, checkpoint=False) as folder:
        if not (folder / METRICS).is_file():
            raise ConfigError([f"RUN: {run} is no folder of a run: it has no {METRICS}"])
        lines = read_metrics(folder)
        found = diagnosed(lines, chosen_rules(folder, rules, plugins))
    if as_json:
        click.echo(json.dumps([attrs.asdict(alert) for alert in found], indent=2))
        return
    steps = max((line["step"] for line in lines), default=0)
    if not found:
        click.echo(f"Nothing found in {steps} steps of {run}.")
    for alert in found:
        click.echo(f"step {alert.step}  {alert.level}  {alert.name}: {alert.message}\n  {alert.advice}")


def chosen_rules(folder: Path, names: Sequence[str] = (), plugins: Sequence[str] = ()) -> dict[str, Any]:
    """Return diagnoses ready to run: those named, or all built-in ones, with the options of the run's configuration.

    Raises:
        PluginError: There is no such diagnosis.
    """
    from rlsdk.plugins import Plugins, short_name

    known = Plugins(plugins)
    options = _options(folder)
    wanted = names or [*known.names("diagnosis")]
    return {n: known.resolve(known.reference("diagnosis", n, options.get(short_name(n), {}))) for n in wanted}


def _options(folder: Path) -> dict[str, Mapping[str, Any]]:
    """Return the options of the built-in diagnoses that a run's configuration names, by their names."""
    import yaml

    from rlsdk.plugins import short_name

    file = folder / "config.yaml"
    kept = yaml.safe_load(file.read_text(encoding="utf-8")) if file.is_file() else None
    listed = kept.get("diagnoses") if isinstance(kept, Mapping) else None
    uses = listed if isinstance(listed, list) else [listed]
    return {
        short_name(use["use"]): {k: v for k, v in use.items() if k != "use"}
        for use in uses
        if isinstance(use, Mapping) and "use" in use
    }
