"""`rlsdk plugins`."""

from __future__ import annotations

import contextlib
import json
import sys
from pathlib import Path

import attrs
import click

from rlsdk.cli import listing
from rlsdk.cli.parameters import json_output, plugin_files
from rlsdk.errors import PluginError
from rlsdk.kinds import KINDS
from rlsdk.plugins import CORE, Plugins

BROKEN = 1


@click.command()
@click.argument("what", metavar="[KIND|NAME]", required=False)
@plugin_files
@click.option("--all", "whole", is_flag=True, help="For algorithms, also show defaults shared with grpo.")
@json_output
@click.pass_context
def plugins(context: click.Context, what: str | None, files: tuple[str, ...], whole: bool, as_json: bool) -> None:
    """List plugins with their components and options.

    Without an argument, all plugins are listed from package metadata. KIND (such as reward) lists the components of a
    kind, NAME those of a plugin; only this imports plugins. Exit status: 0, 1 if the plugin NAME is
    broken, 2 if there is no such kind or plugin.
    """
    found = Plugins(files)
    if what is None:
        entries = [(entry, listing.fault(entry, found)) for claims in found.entries.values() for entry in claims]
        if as_json:
            click.echo(json.dumps([listing.describe_entry(*pair) for pair in entries], indent=2))
        else:
            listing.print_entries(entries)
        return
    with contextlib.redirect_stdout(sys.stderr):  # plugins may print when imported
        offers = _offers(found, what)
    if as_json:
        click.echo(json.dumps({**listing.describe(offers), "hooks": found.hooks(what)}, indent=2, default=str))
    else:
        usual = listing.usual_algorithm(found)
        listing.print_offers(offers, attrs.evolve(usual, options={}) if whole else usual)
        if hooks := found.hooks(what):
            click.echo(f"hooks: {', '.join(hooks)}")
    if offers.broken and what not in KINDS:  # the list of a kind also shows broken plugins, which it is not about
        context.exit(BROKEN)


def _offers(found: Plugins, what: str) -> listing.Offers:
    if what in KINDS:
        return listing.collect(found, found.entries, what)
    if what in found.entries:
        return listing.collect(found, [what], None)
    kinds = []
    for kind in KINDS:
        with contextlib.suppress(PluginError):  # without torch, some kinds cannot be imported
            if what.removeprefix(f"{CORE}/") in found.names(kind):
                kinds.append(kind)
    if kinds:
        commands = " or ".join(f"`rlsdk plugins {kind}`" for kind in kinds)
        text = f"{what!r} is a component of {CORE}, not a plugin; {commands} shows its options"
    elif what.endswith(".py"):
        text = f"{what!r} is a file; `rlsdk plugins {Path(what).stem} --plugin {what}` shows what it offers"
    else:
        text = listing.no_plugin(found, what, kinds=KINDS)
    raise click.BadParameter(text, param_hint="KIND or NAME")
