"""Output of `rlsdk plugins`: plugins, their components and broken entries, as tables or plain values."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import attrs
from rich.markup import escape
from rich.table import Table

from rlsdk.cli.output import WIDTH, borderless, show
from rlsdk.components import Component, Use, brief
from rlsdk.errors import PluginError, nearest
from rlsdk.kinds import OTHER_NAMES, Kind
from rlsdk.plugins import CORE, PluginEntry, Plugins, misspelt_group


@attrs.frozen
class Offers:
    """Components of all plugins, and the entries that failed to load.

    Attributes:
        components: (plugin, component) pairs.
        broken: (entry, cause) pairs.
    """

    components: tuple[tuple[str, Component], ...]
    broken: tuple[tuple[PluginEntry, str], ...]


@attrs.frozen
class UsualAlgorithm:
    """The default algorithm of a run.

    Attributes:
        name: Its name.
        options: Defaults of its options, by name; empty to show all options of other algorithms.
    """

    name: str
    options: Mapping[str, Any]


def fault(entry: PluginEntry, plugins: Plugins) -> str:
    """Return why a plugin cannot be used, according to its metadata."""
    if entry.broken:
        return entry.broken
    claimed = plugins.entries.get(entry.name, ())
    return f"claimed by {' and '.join(c.origin for c in claimed)}; uninstall one" if len(claimed) > 1 else ""


def collect(plugins: Plugins, names: Iterable[str], kind: Kind | None) -> Offers:
    """Collect components, importing plugins as needed; those that fail to import are broken, with the cause."""
    components: list[tuple[str, Component]] = []
    broken: list[tuple[PluginEntry, str]] = []
    for name in names:
        try:
            found = plugins.components(name, kind)
        except PluginError as error:
            cause = str(error).partition(" fails to import: ")[2] or str(error)
            for entry in plugins.entries[name]:
                named = (f"plugin {name!r} ({entry.origin}): ", f"plugin {name!r}: ")  # the listing names it already
                shown = next((cause.removeprefix(each) for each in named if cause.startswith(each)), cause)
                broken.append((entry, fault(entry, plugins) or shown))
            continue
        components += [(name, found[key]) for key in sorted(found)]
    return Offers(tuple(components), tuple(broken))


def full_name(plugin: str, component: Component) -> str:
    """Return a component's name in configurations."""
    return component.name if plugin == CORE else f"{plugin}/{component.name}"


def parts(component: Component) -> dict[str, str]:
    """Return the parts of an algorithm with their defaults; empty for other kinds."""
    if component.kind != "algorithm":
        return {}
    return {option.name: "required" if option.required else brief(option.default) for option in component.options}


def describe_entry(entry: PluginEntry, broken: str) -> dict[str, Any]:
    """Convert an entry to plain values."""
    return {
        "plugin": entry.name,
        "distribution": entry.distribution,
        "version": entry.version,
        "module": entry.module,
        "broken": broken or None,
    }


def describe(offers: Offers) -> dict[str, Any]:
    """Convert offers to plain values."""
    components = [
        {
            "kind": component.kind,
            "name": full_name(plugin, component),
            "plugin": plugin,
            "summary": component.summary,
            "help": component.help,
            "needs": list(component.needs),
            "options": [
                {
                    "name": option.name,
                    "type": option.type_name,
                    **({"schedule": True} if option.schedule else {}),
                    "required": option.required,
                    "default": None if option.required else plain(option.default),
                    "help": option.help,
                }
                for option in component.options
            ],
            **({"parts": parts(component)} if component.kind == "algorithm" else {}),
        }
        for plugin, component in offers.components
    ]
    return {"components": components, "broken": [describe_entry(entry, cause) for entry, cause in offers.broken]}


def plain(value: Any) -> Any:
    """Convert a default to a JSON value."""
    if isinstance(value, Use):
        return {"use": plain(value.name), **{k: plain(v) for k, v in value.options.items()}}
    if isinstance(value, list | tuple):
        return [plain(v) for v in value]
    return value if isinstance(value, str | int | float | bool | None) else str(value)


def no_plugin(plugins: Plugins, name: str, *, kinds: Sequence[Kind] = (), hint: str = "") -> str:
    """Return the error message for an unknown plugin.

    Args:
        plugins: Known plugins.
        name: Name that was given.
        kinds: Kinds of components, where those could be given instead.
        hint: Advice, instead of the nearest name.
    """
    near = (OTHER_NAMES.get(name) if kinds else None) or nearest(name, [*kinds, *plugins.entries])
    hint = hint or (f"; did you mean {near!r}?" if near else ".")
    broken = [f" {each} is broken: {entry.broken}." for each, (entry, *_) in plugins.entries.items() if entry.broken]
    listed = f"Kinds: {', '.join(kinds)}. " if kinds else ""
    return (
        f"no plugin {name!r}{hint} {listed}Plugins: {', '.join(plugins.entries)}.{''.join(broken)} "
        f"Install its package (pip install …), or load a file: --plugin FILE.py.{misspelt_group(name)}"
    )


def print_entries(entries: Sequence[tuple[PluginEntry, str]]) -> None:
    """Show plugins as a table."""
    table = borderless("plugin")
    for name in ("distribution", "version", "status"):
        table.add_column(name, overflow="fold")
    for entry, broken in entries:
        status = f"[red]broken: {escape(broken)}[/red]" if broken else ""
        origin = entry.module if entry.file else entry.distribution
        table.add_row(escape(entry.name), escape(origin), escape(entry.version), status)
    show(table, WIDTH)


def print_offers(offers: Offers, usual: UsualAlgorithm) -> None:
    """Show components as a table, with a row per option, and broken plugins.

    Args:
        offers: Components to show.
        usual: Default algorithm; defaults that others share with it are omitted.
    """
    kinds = dict.fromkeys(component.kind for _, component in offers.components)
    listed = [full_name(*pair) for pair in offers.components if pair[1].kind == "algorithm"]
    explained = usual.name in listed  # its fields are described there; once is enough
    for kind in kinds:
        table = borderless(title=kind, title_style="bold", show_header=False)
        table.add_column(no_wrap=True)
        table.add_column(overflow="fold")
        for plugin, component in offers.components:
            if component.kind == kind:
                _add_component(table, plugin, component, usual, explained=explained)
        show(table)
    if not offers.components and not offers.broken:
        show("no components")
    for entry, cause in offers.broken:
        show(f"{escape(entry.name)} ({escape(entry.origin)})  [red]broken: {escape(cause)}[/red]")


def usual_algorithm(plugins: Plugins) -> UsualAlgorithm:
    """Return the default algorithm of a run."""
    from rlsdk.config import defaults  # imports omegaconf, which a listing of plugins does not need

    component = plugins.component(plugins.reference("algorithm", defaults.ALGORITHM.name))
    return UsualAlgorithm(defaults.ALGORITHM.name, {option.name: option.default for option in component.options})


def _add_component(table: Table, plugin: str, component: Component, usual: UsualAlgorithm, *, explained: bool) -> None:
    name, values = full_name(plugin, component), parts(component)
    shared = usual.options if component.kind == "algorithm" and name != usual.name else {}
    options = [o for o in component.options if o.name not in shared or o.required or shared[o.name] != o.default]
    like = f" [dim](otherwise as {usual.name})[/dim]" if len(options) < len(component.options) else ""
    table.add_row(f"[cyan]{escape(name)}[/cyan]", f"{escape(component.summary)}{like}")
    for option in options:
        given = ", required" if option.required else f" = {brief(option.default)}"
        kind = f"{option.type_name} or schedule" if option.schedule else option.type_name
        value = values.get(option.name, f"{kind}{given}")
        meaning = "" if explained and option.name in shared else f"  [dim]{escape(option.help)}[/dim]"
        table.add_row(f"  {escape(option.name)}", f"{escape(value)}{meaning}")
