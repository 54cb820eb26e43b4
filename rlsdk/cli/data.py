"""`rlsdk data`."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any, get_args

import click

from rlsdk.errors import DataError, visible
from rlsdk.plurals import counted
from rlsdk.sources.countdown import Template


@click.group()
def data() -> None:
    """Create and inspect data sets."""


def _counts(_: click.Context, __: click.Parameter, value: str) -> tuple[int, int]:
    low, hyphen, high = value.partition("-")
    if not low.isdecimal() or (hyphen and not high.isdecimal()):
        raise click.BadParameter(f"{value!r} is neither a number nor a range such as 3-4")
    return int(low), int(high or low)


@data.command(short_help="Create Countdown tasks as parquet files.")
@click.option(
    "--out", required=True, metavar="DIR", type=click.Path(path_type=Path, file_okay=False), help="Folder to write to."
)
@click.option(
    "--train-size",
    type=click.IntRange(1),
    metavar="N",
    default=327_680,
    show_default=True,
    help="Number of training tasks.",
)
@click.option(
    "--test-size", type=click.IntRange(1), metavar="N", default=1_024, show_default=True, help="Number of test tasks."
)
@click.option(
    "--numbers",
    metavar="N|N-M",
    callback=_counts,
    default="3-4",
    show_default=True,
    help="How many numbers each task has.",
)
@click.option(
    "--number-range",
    nargs=2,
    type=int,
    metavar="MIN MAX",
    default=(1, 99),
    show_default=True,
    help="Smallest and largest number.",
)
@click.option(
    "--target-range",
    nargs=2,
    type=int,
    metavar="MIN MAX",
    default=(10, 100),
    show_default=True,
    help="Smallest and largest target.",
)
@click.option(
    "--operators",
    metavar="CHARACTERS",
    default="+-*/",
    show_default=True,
    help="Operators that solutions may need, from +-*/.",
)
@click.option(
    "--template", type=click.Choice(get_args(Template)), default="base", show_default=True, help="Prompt format."
)
@click.option(
    "--demonstrations", type=float, metavar="SHARE", help="Add demonstrations, of which this share (0 to 1) is correct."
)
@click.option("--seed", default=0, metavar="N", show_default=True, help="Random seed of the tasks.")
@click.option("--overwrite", is_flag=True, help="Replace existing files.")
def countdown(out: Path, train_size: int, test_size: int, overwrite: bool, **options: Any) -> None:
    """Create Countdown tasks: DIR/train.parquet and DIR/test.parquet, with the columns that veRL and TinyZero read.

    TinyZero reads `nums` and `target`; veRL reads the same values from `reward_model.ground_truth`. Every task is
    solvable, and no problem occurs in both files, even with its numbers in another order.
    """
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    from rlsdk.sources.countdown import countdown as tasks_of
    from rlsdk.sources.tables import tinyzero_columns, write

    files = {split: out / f"{split}.parquet" for split in ("train", "test")}
    existing = [str(file) for file in files.values() if file.exists()]
    if existing and not overwrite:
        raise click.UsageError(
            f"{' and '.join(existing)} exist; choose another folder, or replace them with --overwrite"
        )
    sizes = {"train": train_size, "test": test_size}
    tasks = {split: tasks_of(split=split, size=sizes[split], **options) for split in files}  # type: ignore[arg-type]
    bar = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*bar, console=Console(stderr=True)) as progress:
        for split, file in files.items():
            line = progress.add_task(split, total=sizes[split])
            advance = partial(progress.advance, line)
            write(tasks[split], file, advance, tinyzero_columns)
    for split, file in files.items():
        click.echo(f"{file}: {counted(sizes[split], 'task')}, {file.stat().st_size / 1e6:.1f} MB")


@data.command(short_help="Show the first rows of a file.")
@click.argument("file")
@click.option(
    "-n", "count", type=click.IntRange(1), metavar="N", default=5, show_default=True, help="Number of rows to show."
)
@click.option("--json", "as_json", is_flag=True, help="Print a JSON list.")
def show(file: str, count: int, as_json: bool) -> None:
    """Show the first rows of FILE: parquet, or JSON lines, optionally compressed."""
    rows = _first_rows(file, count)
    if not rows:
        click.echo(f"rlsdk: {file} has no rows", err=True)
    if as_json:
        click.echo(json.dumps(rows, indent=2, default=str))
        return
    for number, row in enumerate(rows):
        click.secho(f"row {number}", bold=True)
        for name, value in row.items():
            click.echo(f"  {visible(str(name))}: {_shown(value)}")


def _first_rows(file: str, count: int) -> list[dict[str, Any]]:
    """Return the first rows of a file, reading no more than needed."""
    import fsspec

    from rlsdk.sources.tables import find, is_parquet

    path = find([file], "train", "parquet")[0]
    try:
        parquet = is_parquet(path)
        with fsspec.open(path, "rb", compression=None if parquet else "infer") as opened:
            if not parquet:
                return _json_rows(opened, count)
            import pyarrow.parquet as pq

            rows: list[dict[str, Any]] = []
            for batch in pq.ParquetFile(opened).iter_batches(batch_size=count):
                rows += batch.to_pylist()
                if len(rows) >= count:
                    break
            return rows[:count]
    except DataError as error:
        raise DataError(f"{file}: {error}") from error
    except Exception as error:  # report the file and the cause, whatever a hostile file makes its reader raise
        raise DataError(f"{file} cannot be read: {error}") from error


def _json_rows(opened: Any, count: int) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    for number, line in enumerate(opened, 1):
        if len(rows) == count:
            break
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise DataError(
                f"line {number} is not JSON ({error}); expected parquet, or one JSON object per line"
            ) from error
        if not isinstance(row, dict):
            hint = "; write each of its elements on its own line" if isinstance(row, list) else ""
            raise DataError(f"line {number} is not a JSON object{hint}")
        rows.append(row)
    return rows


def _shown(value: Any) -> str:
    """Format a value for reading: messages one by one, long text with its line breaks, the rest as JSON."""
    if isinstance(value, str):
        return visible(value, "\n").replace("\n", "\n      ")
    if isinstance(value, list) and value and all(isinstance(m, dict) and {"role", "content"} <= set(m) for m in value):
        return "".join(f"\n    {_shown(m['role'])}: {_shown(m['content'])}" for m in value)
    return visible(json.dumps(value, default=str, ensure_ascii=False))
