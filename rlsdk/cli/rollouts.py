"""`rlsdk rollouts`."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import click

from rlsdk.cli.parameters import FiniteRange, RunPath
from rlsdk.errors import ValueFault

SHOWN = ("step", "source", "task", "rollout", "state", "uses", "reward", "status", "tokens")
"""Columns of the table, before the response."""
_MOST, _LEAST, _GAP = 400, 20, 2
"""Maximum characters of a cell; minimum width of a text column; width between columns."""


@click.command()
@click.argument("run", type=RunPath())
@click.option(
    "--where", metavar="CONDITION", default="", help='Condition in SQL, such as "reward < 0.5 and step >= 10".'
)
@click.option(
    "--order-by", metavar="COLUMN", default="", help='Column to sort by, such as "reward desc".  [default: step]'
)
@click.option(
    "--limit",
    type=click.IntRange(min=1),
    metavar="N",
    default=20,
    show_default=True,
    help="Maximum number of rows to show.",
)
@click.option(
    "--timeout",
    type=FiniteRange(min=0, min_open=True),
    default=60.0,
    show_default=True,
    metavar="SECONDS",
    help="Time limit for the query.",
)
@click.option(
    "--eval", "evaluations", is_flag=True, help="Show the answers of evaluations instead of training rollouts."
)
@click.option("--json", "as_json", is_flag=True, help="Print a JSON list, with all columns.")
def rollouts(run: str, where: str, order_by: str, limit: int, timeout: float, evaluations: bool, as_json: bool) -> None:
    """Query rollouts of the run in the folder (or at the URL) RUN, also while it trains.

    Columns: step (in which the group was trained or filtered), source, task, number (of the group), state, uses (times
    trained), rollout (index in the group), reward, valid, reason, parts (JSON), status, tokens (sampled),
    length, least_version, greatest_version, trajectory, prompt, response.
    """
    from rlsdk.checkpoints.mirror import local_copy
    from rlsdk.runlog.query import query, why_none
    from rlsdk.runlog.store import Address

    with local_copy(run, checkpoint=False) as folder:
        rows = []
        if not (folder / "config.yaml").is_file() or Address.of(folder) is not None:  # else the run has only begun
            try:
                rows = query(
                    folder, where, order_by=order_by, limit=limit + 1, seconds=timeout, evaluations=evaluations
                )
            except ValueFault as error:
                raise click.UsageError(str(error)) from error
        if not rows:
            click.echo(why_none(folder, where, evaluations=evaluations, name=run), err=True)
    if as_json:
        click.echo(json.dumps(rows[:limit], indent=2))
    elif rows:
        _show(rows[:limit])
    if len(rows) > limit and not as_json:
        click.echo(f"the first {limit}; --limit shows more")


def _show(rows: Sequence[Mapping[str, Any]]) -> None:
    from rich.table import Column

    from rlsdk.cli.output import borderless, console

    texts = ("response", "reason") if any(row["valid"] == 0 for row in rows) else ("response",)
    cells = {name: [_cell(row[name]) for row in rows] for name in (*SHOWN, *texts)}
    widths = {name: max(len(name), *(cell.cell_len for cell in column)) for name, column in cells.items()}
    terminal = console()
    # The texts share what the other columns leave; rich would shrink every column, down to nothing.
    taken = sum(widths[name] + _GAP for name in SHOWN)
    terminal.width = max(terminal.width, taken + (_LEAST + _GAP) * len(texts))
    room = terminal.width - taken - _GAP * len(texts)
    reason = min(widths.get("reason", 0), max(room // 2, room - widths["response"]))
    table = borderless(*(Column(name, no_wrap=True) for name in SHOWN))
    table.add_column("response", overflow="ellipsis", no_wrap=True, max_width=room - reason)
    if "reason" in texts:
        table.add_column("reason", overflow="fold", max_width=reason)
    for row in zip(*cells.values(), strict=True):
        table.add_row(*row)
    terminal.print(table)


def _cell(value: Any) -> Any:
    """Format a value on one line, with terminal control sequences escaped."""
    from rich.text import Text

    from rlsdk.errors import visible

    if isinstance(value, str):
        return Text(visible(value[:_MOST]))
    return Text("" if value is None else f"{value:.4g}" if isinstance(value, float) else str(value))
