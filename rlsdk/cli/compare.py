"""`rlsdk compare`."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import click

from rlsdk.cli.parameters import json_output


@click.command()
@click.argument("runs", nargs=-1, required=True, metavar="RUN RUN …", type=click.Path(path_type=Path, file_okay=False))
@click.option(
    "--html", type=click.Path(path_type=Path, dir_okay=False), metavar="FILE", help="Write an HTML page with curves."
)
@json_output
def compare(runs: Sequence[Path], html: Path | None, as_json: bool) -> None:
    """Compare the runs in folders RUN: settings that differ, results with confidence intervals, winners.

    Runs that differ only in their seed form one group.
    """
    from rlsdk.cli.output import console, print_rows
    from rlsdk.reporting import compare as room
    from rlsdk.reporting.report import read_run
    from rlsdk.runlog.folder import write_output

    if len(runs) < 2:
        raise click.UsageError("expected two runs or more; one alone is shown by `rlsdk report RUN`")
    read = [read_run(run) for run in runs]
    if html is not None:
        html.parent.mkdir(parents=True, exist_ok=True)
        write_output(html, room.comparison_page(read))
    found = room.comparison(read)
    if as_json:
        click.echo(json.dumps(found, indent=2, default=str))
        return
    labels, out = [*found["groups"]], console()
    print_rows(out, "settings that differ", ("setting", *labels), room.difference_rows(found))
    print_rows(out, "results", ("metric", *labels), room.metric_rows(found))
    print_rows(out, "held-out winners", ("tasks", "winner", "mean", ""), room.winner_rows(found))
    for folder, status in found["unfinished"].items():
        out.print(f"{folder} has not finished ({status}); its values are those so far", markup=False, soft_wrap=True)
    for folder, counts in room.missing_rows(found):
        out.print(f"{folder} lacks values, which are left out: {counts}", markup=False, soft_wrap=True)
    out.print(room.INTERVALS, style="dim", highlight=False)
    if html is not None:
        click.echo(html)
