"""`rlsdk model`."""

from __future__ import annotations

from pathlib import Path

import click


@click.group()
def model() -> None:
    """Create models."""


@model.group()
def new() -> None:
    """Create a model with random weights."""


@new.command(short_help="Create a small model for machines without a GPU.")
@click.argument("folder", metavar="DIR", type=click.Path(path_type=Path, file_okay=False))
@click.option("--seed", default=0, metavar="N", show_default=True, help="Random seed of the weights.")
@click.option("--layers", default=2, metavar="N", show_default=True, help="Transformer layers.")
@click.option("--hidden", default=128, metavar="N", show_default=True, help="Width.")
@click.option(
    "--heads", default=4, metavar="N", show_default=True, help="Attention heads; must divide the hidden size."
)
@click.option("--intermediate", default=256, metavar="N", show_default=True, help="Width of the feed-forward layers.")
@click.option(
    "--largest", default=100, metavar="N", show_default=True, help="Make each number from 0 to this a single token."
)
@click.option("--letters", is_flag=True, help="Make each letter from a to z a single token.")
@click.option(
    "--initializer-range", default=0.05, metavar="NUMBER", show_default=True, help="Standard deviation of the weights."
)
@click.option(
    "--experts", default=0, metavar="N", show_default=True, help="Experts per layer, at least 2; 0: a dense model."
)
@click.option("--overwrite", is_flag=True, help="Write into a folder that is not empty.")
def nano(folder: Path, overwrite: bool, letters: bool, **shape: int) -> None:
    """Create a small Llama-shaped model for machines without a GPU; its tokenizer has whole numbers as tokens."""
    if not overwrite and folder.is_dir() and any(folder.iterdir()):
        raise click.UsageError(f"{folder} is not empty; choose another folder, or write into it with --overwrite")
    if shape["hidden"] % shape["heads"]:
        raise click.UsageError(f"--hidden {shape['hidden']} is not a multiple of --heads {shape['heads']}")
    if shape["experts"] < 0 or shape["experts"] == 1:
        raise click.UsageError(f"--experts {shape['experts']}: a token chooses two of them; give 2 or more, or 0")
    from rlsdk.nano import create

    parameters = create(folder, letters=letters, **shape)
    click.echo(f"{folder}: {parameters:,} parameters")
