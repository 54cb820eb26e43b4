"""`rlsdk rollouts`."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import click

from rlsdk.errors import ValueFault

SHOWN = ("step", "source", "task", "rollout", "state", "uses", "reward", "status", "tokens")
"""Columns of the table, before the response."""
_MOST = 400
"""Characters of a cell."""


@click.command()
@click.argument("run", type=click.Path(path_type=Path))
@click.option("--where", metavar="CONDITION", default="", help='As in SQL: "reward < 0.5 and step >= 10".')
@click.option("--order-by", metavar="COLUMN", default="", help='By default step; "reward desc": the greatest first.')
@click.option("--limit", type=click.IntRange(min=1), default=20, show_default=True, help="Rows at most.")
@click.option("--json", "as_json", is_flag=True, help="Print a JSON list, with all columns.")
def rollouts(run: Path, where: str, order_by: str, limit: int, as_json: bool) -> None:
    """Show rollouts of the run in the folder RUN, also while it trains.

    Columns: step (that the group was trained in, or left out of), source, task, number (of the group), state, uses
    (times trained), rollout (its place in the group), reward, valid, reason, parts (JSON), status, tokens (sampled),
    length, least_version, greatest_version, trajectory, prompt, response.
    """
    from rlsdk.runlog.query import query

    try:
        rows = query(run, where, order_by=order_by, limit=limit + 1)
    except ValueFault as error:
        raise click.UsageError(str(error)) from error
    if as_json:
        click.echo(json.dumps(rows[:limit], indent=2))
        return
    _show(rows[:limit])
    if len(rows) > limit:
        click.echo(f"the first {limit}; --limit shows more")


def _show(rows: Sequence[Mapping[str, Any]]) -> None:
    from rich.table import Column, Table

    from rlsdk.cli.listing import console

    columns = [Column(name, no_wrap=True) for name in SHOWN]
    table = Table(*columns, Column("response", overflow="ellipsis", no_wrap=True), box=None, pad_edge=False)
    for row in rows:
        table.add_row(*(_cell(row[name]) for name in (*SHOWN, "response")))
    console().print(table)


def _cell(value: Any) -> Any:
    """A value on one line; what moves a terminal's cursor or changes its colours is shown as its escape."""
    from rich.text import Text

    if isinstance(value, str):
        return Text("".join(c if c.isprintable() else repr(c)[1:-1] for c in value[:_MOST]))
    return Text("" if value is None else f"{value:.4g}" if isinstance(value, float) else str(value))
