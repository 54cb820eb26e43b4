"""`rlsdk plugins`."""

from __future__ import annotations

import contextlib
import json
import sys
from pathlib import Path

import attrs
import click

from rlsdk.cli import listing
from rlsdk.cli.parameters import plugin_files
from rlsdk.errors import PluginError, UnknownComponentError
from rlsdk.kinds import KINDS, OTHER_NAMES
from rlsdk.options import nearest
from rlsdk.plugins import CORE, Plugins, misspelt_group

BROKEN = 1


@click.command()
@click.argument("what", metavar="[KIND|NAME]", required=False)
@plugin_files
@click.option("--all", "whole", is_flag=True, help="For algorithms, also show defaults shared with grpo.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.pass_context
def plugins(context: click.Context, what: str | None, files: tuple[str, ...], whole: bool, as_json: bool) -> None:
    """List plugins with their components and options.

    Without an argument, all plugins are listed from package metadata. KIND (such as reward) lists the components of a
    kind, NAME those of a plugin; only this imports plugins. Exit status: 0, or 1 if there is no such kind or plugin, or
    if the plugin NAME is broken.
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
    near = OTHER_NAMES.get(what) or nearest(what, [*KINDS, *found.entries])
    kinds = []
    for kind in KINDS:
        with contextlib.suppress(PluginError):  # without torch, some kinds cannot be imported
            if what.removeprefix(f"{CORE}/") in found.names(kind):
                kinds.append(kind)
    if kinds:
        commands = " or ".join(f"`rlsdk plugins {kind}`" for kind in kinds)
        raise UnknownComponentError(f"{what!r} is a component of {CORE}, not a plugin; {commands} shows its options")
    if what.endswith(".py"):
        raise UnknownComponentError(
            f"{what!r} is a file; `rlsdk plugins {Path(what).stem} --plugin {what}` shows what it offers"
        )
    raise UnknownComponentError(
        f"{what!r} is neither a kind nor a plugin{f'; did you mean {near!r}?' if near else ''}\n"
        f"kinds: {', '.join(KINDS)}\n"
        f"plugins: {', '.join(found.entries)} (a package is listed once it is installed: pip install …)"
        f"{misspelt_group(what)}"
    )
