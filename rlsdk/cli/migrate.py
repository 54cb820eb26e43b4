"""`rlsdk migrate`."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs
import click
import yaml
from rich.table import Column, Table
from rich.text import Text

from rlsdk.cli.output import borderless, console
from rlsdk.errors import ConfigError
from rlsdk.migration import FRAMEWORKS, KeyReport, Migration
from rlsdk.migration import migrate as convert
from rlsdk.migration.recognition import recognise
from rlsdk.migration.rules import Status
from rlsdk.runlog.folder import replace_text

STATUSES: Mapping[Status, str] = {
    "missing": "no counterpart: to do",
    "changed": "mapped, with a change of meaning",
    "mapped": "mapped",
    "ignored": "needs nothing",
}


@click.command(context_settings={"ignore_unknown_options": True})
@click.argument("trainer", metavar="|".join(FRAMEWORKS), type=click.Choice(FRAMEWORKS, case_sensitive=False))
@click.argument("source", metavar="FILE|COMMAND...", nargs=-1, required=True, type=click.UNPROCESSED)
@click.option("--out", type=click.Path(path_type=Path, dir_okay=False), help="Write the config to this file.")
@click.option("--table", type=click.Path(path_type=Path, dir_okay=False), help="Write the report as a Markdown table.")
@click.option("--json", "as_json", is_flag=True, help="Print config and report as JSON.")
def migrate(trainer: str, source: tuple[str, ...], out: Path | None, table: Path | None, as_json: bool) -> None:
    """Convert another trainer's configuration to rlsdk's, with a report on every key.

    FILE is a YAML file, a shell script that starts training, or a Python file (XTuner, TRL); overrides may follow.
    COMMAND is the command that starts training, quoted or not; it is not executed. Environment variables with numbers
    must be set.

    Without --out, the config goes to standard output and the report to standard error.
    """
    found = convert(trainer, source, os.environ)
    if found.entries and not any(found.framework.row(entry.key) for entry in found.entries):
        other = recognise(source[0])
        hint = (
            f"it looks like a config of {other.title}: rlsdk migrate {other.name} {source[0]}"
            if other
            else "name the trainer that the file was written for"
        )
        raise ConfigError([f"{source[0]}: {found.framework.title} has none of its {len(found.entries)} keys; {hint}"])
    for file in (out, table):
        if file is not None and file.exists():
            raise ConfigError([f"{file} exists; choose another file, or delete it"])
    if out is not None and table is not None and out.resolve() == table.resolve():
        raise ConfigError([f"{out} is given for both --out and --table; choose another file for one of them"])
    faults = _faults(found)
    written = _as_yaml(found, source[0] if len(source) == 1 else " ".join(source))
    if out is not None:
        out.parent.mkdir(parents=True, exist_ok=True)
        replace_text(out, written)
    if table is not None:
        table.parent.mkdir(parents=True, exist_ok=True)
        replace_text(table, _as_markdown(found))
    if as_json:
        click.echo(json.dumps(_as_json(found, faults), indent=2, default=str))
        return
    if out is None:
        click.echo(written, nl=False)
    _print(found, faults, out, to_stderr=out is None)


def _faults(found: Migration) -> tuple[str, ...]:
    """Return the faults that rlsdk's check finds in the config."""
    from rlsdk.config import check

    try:
        check(yaml.safe_load(yaml.safe_dump(found.config)))
    except ConfigError as error:
        return error.faults
    return ()


def _as_yaml(found: Migration, origin: str) -> str:
    title = found.framework.title
    shown = origin if len(origin) <= 80 else origin[:77] + "..."
    head = f"# From a {title} configuration, by `rlsdk migrate {found.framework.name}`: {' '.join(shown.split())}\n"
    todo = [f"# To do: {entry.key}: {entry.note}\n" for entry in found.entries if entry.status == "missing"]
    todo += [f"# Note: {' '.join(note.split())}\n" for note in found.notes]
    body = yaml.safe_dump(dict(found.config), sort_keys=False, default_flow_style=None, width=120, allow_unicode=True)
    return head + "".join(todo) + body


def _as_markdown(found: Migration) -> str:
    def cell(text: object) -> str:
        return " ".join(str(text).split()).replace("|", r"\|")

    rows = [
        (entry.key, entry.value, STATUSES[status], ", ".join(entry.to), entry.note)
        for status in STATUSES
        for entry in found.entries
        if entry.status == status
    ]
    rows += [(e.key, e.value, "default, not given", ", ".join(e.to), e.note) for e in found.defaults]
    head = (f"{found.framework.title} key", "value", "status", "rlsdk", "note")
    return "".join(f"| {' | '.join(map(cell, row))} |\n" for row in (head, ["---"] * len(head), *rows))


def _as_json(found: Migration, faults: Sequence[str]) -> dict[str, Any]:
    return {
        "trainer": found.framework.name,
        "config": found.config,
        "keys": [attrs.asdict(entry) for entry in found.entries],
        **{
            status: [{"key": e.key, "to": e.to, "note": e.note} for e in found.entries if e.status == status]
            for status in STATUSES
        },
        "defaults": [attrs.asdict(entry) for entry in found.defaults],
        "notes": list(found.notes),
        "faults": list(faults),
    }


def _print(found: Migration, faults: Sequence[str], out: Path | None, *, to_stderr: bool) -> None:
    output = console()
    output.stderr = to_stderr
    title = found.framework.title
    for status, heading in STATUSES.items():
        if entries := [entry for entry in found.entries if entry.status == status]:
            output.print(_table(f"{heading} ({len(entries)})", entries))
    if found.defaults:
        output.print(_table(f"not given: {title}'s defaults, where rlsdk's may differ", found.defaults))
    counts = Counter(entry.status for entry in found.entries)
    summary = ", ".join(f"{counts[status]} {heading}" for status, heading in STATUSES.items() if counts[status])
    click.echo(f"{len(found.entries)} keys: {summary}", err=to_stderr)
    for note in found.notes:
        click.echo(f"note: {note}", err=to_stderr)
    if out is not None:
        click.echo(f"written: {out}", err=to_stderr)
    if faults:
        click.echo("before it runs (rlsdk explain):", err=to_stderr)
        for fault in faults:
            click.echo(f"  - {fault}", err=to_stderr)
    else:
        click.echo("rlsdk explain finds no fault in it", err=to_stderr)


def _table(title: str, entries: Iterable[KeyReport]) -> Table:
    table = borderless(*(Column(overflow="fold") for _ in range(2)), title=title, show_header=False)
    for entry in entries:
        value = str(entry.value)
        shown = value if len(value) <= 40 else value[:37] + "…"
        remark = " ".join(
            filter(None, [", ".join(entry.to), f"({entry.note})" if entry.to and entry.note else entry.note])
        )
        table.add_row(Text(f"{entry.key}={shown}"), Text(remark))
    return table
