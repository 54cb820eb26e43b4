"""`rlsdk doctor`."""

from __future__ import annotations

import json

import click
from rich.markup import escape

from rlsdk.cli.output import console, wrapped
from rlsdk.cli.parameters import json_output
from rlsdk.plurals import counted

FAULTY = 1
COLOURS = {"ok": "green", "warn": "yellow", "fail": "red"}


@click.command()
@json_output
@click.pass_context
def doctor(context: click.Context, as_json: bool) -> None:
    """Check this machine: versions, GPU, compilers, memory, disk, network, logins.

    Each line reports what was found and, if something is missing, what to do. Nothing is started or downloaded. Exit
    status: 0 training can run, 1 it cannot.
    """
    from rlsdk.readiness.doctor import diagnose

    found = diagnose()
    failed = [each for each in found if each.status == "fail"]
    if as_json:
        click.echo(json.dumps({"checks": [each.describe() for each in found]}, indent=2))
    else:
        out = console()
        width = max(len(each.name) for each in found)
        for each in found:
            line = wrapped(f"{each.status:<4} {each.name:<{width}}  {each.found}", indent=width + 7)
            mark = f"[{COLOURS[each.status]}]{each.status}[/]"
            out.print(mark + escape(line.removeprefix(each.status)), soft_wrap=True, highlight=False)
            if each.remedy:
                remedy = wrapped(" " * (width + 7) + each.remedy, indent=width + 7)
                out.print(escape(remedy), style="dim", soft_wrap=True, highlight=False)
        warned = sum(each.status == "warn" for each in found)
        out.print(
            f"\n{counted(len(found), 'check')}, {counted(warned, 'warning')}, {len(failed)} failed", highlight=False
        )
    if failed:
        context.exit(FAULTY)
