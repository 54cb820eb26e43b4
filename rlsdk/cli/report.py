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
    help="Also draw the curves as PNG files in DIR.  [default: report/ next to report.html]",
)
def report(run: Path, pictures: str | None) -> None:
    """Write report.html to the folder RUN: one self-contained file without scripts.

    It shows what ran, what was learned, where the time went, rollouts, warnings, and how to reproduce the run. Training
    writes the report when it ends; this command also works while a run trains.
    """
    from rlsdk.reporting.report import write_pictures, write_report

    click.echo(write_report(run))
    if pictures is not None:
        for path in write_pictures(run, Path(pictures) if pictures else run / "report"):
            click.echo(path)
