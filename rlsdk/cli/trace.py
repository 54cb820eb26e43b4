"""`rlsdk trace`."""

from __future__ import annotations

import json
from pathlib import Path

import click


@click.command()
@click.argument("run", type=click.Path(path_type=Path, file_okay=False))
@click.option(
    "--out", type=click.Path(path_type=Path, dir_okay=False), metavar="FILE", help="File.  [default: RUN/trace.json]"
)
def trace(run: Path, out: Path | None) -> None:
    """Write the steps of the run in the folder RUN as a Chrome trace, which Perfetto opens (https://ui.perfetto.dev).

    A lane for the steps and one each for engines, learner, driver and weights, with tokens and rewards as counters.
    """
    from rlsdk.errors import ConfigError
    from rlsdk.reporting.trace import chrome_trace
    from rlsdk.runlog.metrics import METRICS, read_metrics

    if not (run / METRICS).is_file():
        raise ConfigError([f"RUN: {run} is no folder of a run: it has no {METRICS}"])
    path = out or run / "trace.json"
    path.write_text(json.dumps(chrome_trace(read_metrics(run), run.name)), encoding="utf-8")
    click.echo(path)
