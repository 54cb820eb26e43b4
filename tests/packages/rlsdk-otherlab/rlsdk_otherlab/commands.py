"""Commands."""

from __future__ import annotations

from pathlib import Path

import click


@click.command()
@click.argument("run", type=click.Path(exists=True, path_type=Path))
def count(run: Path) -> None:
    """Count the steps of a run."""
    click.echo(len((run / "metrics.jsonl").read_text().splitlines()))
