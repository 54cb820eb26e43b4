"""`rlsdk engines`."""

from __future__ import annotations

import json
from pathlib import Path

import attrs
import click

from rlsdk.cli.parameters import json_output
from rlsdk.errors import ArgumentError, RunError
from rlsdk.plurals import counted
from rlsdk.runlog.actors import read_status, request_engines, requested_engines
from rlsdk.runlog.folder import why_no_run

_AGAIN = "resume it with rlsdk train --resume"


@click.command()
@click.argument("run", type=click.Path(path_type=Path, file_okay=False))
@click.option(
    "--count", type=click.IntRange(1), metavar="N", help="Change the number of engines from the next step on."
)
@json_output
def engines(run: Path, count: int | None, as_json: bool) -> None:
    """Show the engines of the run in the folder RUN; with --count, start or stop engines.

    The run reads the request at the beginning of each step. An engine finishes its requests before it stops. If Ray
    lacks resources for another engine, the request is refused, here and in the run's log, and the run continues. A run
    that has ended accepts no requests.
    """
    if not (run / "config.yaml").is_file():
        raise ArgumentError([why_no_run(run, "config.yaml")])
    state = read_status(run)
    over = "" if state is None else state.over
    if count is not None:
        if over:
            raise RunError(f"the run in {run} has ended ({over}), and so have its engines; {_AGAIN}")
        request_engines(run, count)
    wish = requested_engines(run)
    if as_json:
        found = None if state is None else {**attrs.asdict(state), "ended": over}
        click.echo(json.dumps({"asked": wish, "state": found}, indent=2))
        return
    if over:
        click.echo(f"The run has ended ({over}), and so have its engines. To continue it, {_AGAIN}.")
        return
    if state is None:
        click.echo("The run has not reported its engines yet.")
    else:
        ranks = ", ".join(map(str, state.alive)) or "none"
        click.echo(f"{counted(state.wanted, 'engine')}; running: {ranks}; {state.lost} died so far.")
        if state.refused:
            click.echo(f"{state.refused}. The run tries again at each step.")
    pending = wish is not None and (state is None or wish != state.wanted)
    if pending and (count is not None or state is None or not state.refused):
        click.echo(f"Requested: {wish}. The run reads the request at the beginning of its next step.")
