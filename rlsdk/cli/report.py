"""`rlsdk report`."""

from __future__ import annotations

from pathlib import Path

import click


@click.command()
@click.argument("run", type=click.Path(path_type=Path, file_okay=False))
@click.option(
    "--png",
    "pictures",
    is_flag=False,
    flag_value="",
    metavar="[DIR]",
    help="Draw the curves as PNG files, too, into DIR.  [default: report/ beside report.html]",
)
def report(run: Path, pictures: str | None) -> None:
    """Write report.html into the folder RUN: one file without scripts or links to the network.

    It shows what ran, what was learned, where the time went, rollouts, warnings, and how to repeat the run. A training
    writes the report when it ends; this command also works while a run trains.
    """
    from rlsdk.reporting.report import write_pictures, write_report

    click.echo(write_report(run))
    if pictures is not None:
        for path in write_pictures(run, Path(pictures) if pictures else run / "report"):
            click.echo(path)
