"""`rlsdk export`."""

from __future__ import annotations

from pathlib import Path

import click

from rlsdk.cli.parameters import RunPath


@click.command()
@click.argument("run", type=RunPath())
@click.argument("folder", metavar="DIR", type=click.Path(path_type=Path))
@click.option(
    "--step",
    type=click.IntRange(min=0),
    metavar="STEP",
    help="Step of the checkpoint.  [default: the newest complete one]",
)
@click.option(
    "--plugin",
    "files",
    metavar="FILE",
    multiple=True,
    help="Load a Python file that the run used as a plugin; repeatable.",
)
def export(run: str, folder: Path, step: int | None, files: tuple[str, ...]) -> None:
    """Export the model of the run in the folder (or at the URL) RUN to the folder DIR, in transformers format.

    If the checkpoint contains an export, it is copied; otherwise the run's learner is started to write one.
    """
    from rlsdk.checkpoints.export import export as write
    from rlsdk.checkpoints.mirror import local_copy

    with local_copy(run, step=step) as local:
        found = write(local, folder, step=step, plugins=files)
    click.echo(f"{folder}: the model of {run} after step {found}")
