"""Text and tables on standard output, as wide as the terminal."""

from __future__ import annotations

import os
import sys
import textwrap
from collections.abc import Iterable, Sequence
from typing import Any

import click
from rich.console import Console, RenderableType
from rich.markup import escape
from rich.table import Column, Table
from rich.text import Text

from rlsdk.errors import visible

WIDTH = 160
"""Width of data tables if neither a terminal nor COLUMNS limits it."""
TEXT_WIDTH = 100
"""Width of text tables in that case."""
NARROWEST = 10
"""Minimum value of COLUMNS that is accepted as a terminal's width."""


def console(unlimited: int = WIDTH) -> Console:
    """Return a console for standard output, as wide as the terminal or, without one, as COLUMNS.

    Args:
        unlimited: Width if neither is available.
    """
    return Console(width=None if _is_limited() else unlimited, highlight=False)


def _is_limited() -> bool:
    columns = os.environ.get("COLUMNS", "")
    if columns.isdigit() and int(columns) < NARROWEST:  # some programs set 0 if there is no terminal
        return False
    return sys.stdout.isatty() or columns.isdigit()


def wrapped(line: str, indent: int) -> str:
    """Wrap a line if a terminal or COLUMNS limits the width; words such as paths are not broken."""
    if not _is_limited():
        return line
    fold = textwrap.TextWrapper(
        console().width, subsequent_indent=" " * indent, break_long_words=False, break_on_hyphens=False
    )
    return "\n".join(fold.fill(each) for each in line.split("\n"))


def show(content: RenderableType, unlimited: int = TEXT_WIDTH) -> None:
    """Print to standard output, without the trailing spaces of table lines.

    Args:
        content: Object to print.
        unlimited: Width if neither a terminal nor COLUMNS limits it.
    """
    out = console(unlimited)
    with out.capture() as written:
        out.print(content)
    click.echo("\n".join(line.rstrip() for line in written.get().splitlines()))


def borderless(*columns: Column | str, **options: Any) -> Table:
    """Return a table without lines, to be filled; its title, if any, is on the left."""
    return Table(*columns, title_justify="left", box=None, pad_edge=False, **options)


def print_rows(out: Console, title: str, head: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """Print rows of plain text under a title; nothing if there are none."""
    table = borderless(*map(escape, head), title=title)
    for row in rows:
        table.add_row(*(Text(visible(cell)) for cell in row))
    if table.rows:
        out.print(table)
