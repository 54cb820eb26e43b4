"""`rlsdk config`."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import click
from rich.console import Group
from rich.markup import escape
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from rlsdk.cli import listing
from rlsdk.cli.output import borderless, show
from rlsdk.cli.parameters import json_output, plugin_files
from rlsdk.components import brief
from rlsdk.config.json_schema import json_schema
from rlsdk.config.reference import DEFAULTS, ConfigKey, of_component, settings
from rlsdk.errors import UnknownComponentError, nearest
from rlsdk.kinds import KINDS, Kind
from rlsdk.plugins import CORE, Plugins


@click.command()
@click.argument("section", required=False)
@click.option("--schema", is_flag=True, help="Print a JSON schema for editors, with the options of installed plugins.")
@plugin_files
@json_output
def config(section: str | None, schema: bool, files: tuple[str, ...], as_json: bool) -> None:
    """Show all configuration keys with type, default, unit and description.

    SECTION, such as `rollout` or `learner.lr`, selects a part. For a component (engine, learner, algorithm and so on),
    the options of the default one are shown; `rlsdk plugins KIND` lists all of a kind.
    """
    plugins = Plugins(files)
    if schema:
        if section or as_json:
            raise click.UsageError("--schema covers the whole configuration and is already JSON; give it alone.")
        click.echo(json.dumps(json_schema(offered(plugins)), indent=1))
        return
    found = _chosen(plugins, section)
    if as_json:
        click.echo(json.dumps([described(setting) for setting in found], indent=2))
        return
    show(table(found))
    kinds = {setting.kind for setting in found if setting.kind and section}
    for kind in sorted(kinds):
        names = ", ".join(name for _, name in plugins.components(CORE, kind))
        show(f"\n{kind}: {escape(names)}; `rlsdk plugins {kind}` shows their options, and those of plugins")


def offered(plugins: Plugins, names: Sequence[str] | None = None) -> dict[Kind, dict[str, Any]]:
    """Return the components of plugins by kind and by name in configurations; broken plugins offer none.

    Args:
        plugins: Installed plugins, and those given as files.
        names: Names of plugins; defaults to all.
    """
    found: dict[Kind, dict[str, Any]] = {kind: {} for kind in KINDS}
    for plugin, component in listing.collect(plugins, plugins.entries if names is None else names, None).components:
        found[component.kind][listing.full_name(plugin, component)] = component
    return found


def _chosen(plugins: Plugins, section: str | None) -> list[ConfigKey]:
    """Find the keys of a section, with the options of its default component.

    Raises:
        UnknownComponentError: The section does not exist.
    """
    found = settings()
    if section is None:
        return found
    for path, use in DEFAULTS.items():
        if section == path or section.startswith(f"{path}."):
            reference = plugins.reference(next(s.kind for s in found if s.path == path and s.kind), use.name)
            found += of_component(plugins.component(reference), path)
    chosen = [s for s in found if s.path == section or s.path.startswith(f"{section}.")]
    if not chosen:
        paths = [s.path for s in found]
        near = [path for path in paths if path.rpartition(".")[2] == section.rpartition(".")[2]]  # in any section
        near = near or [path for path in [nearest(section, paths)] if path]
        sections = ", ".join(s.path for s in found if s.section or s.kind)
        hint = f"did you mean {' or '.join(map(repr, near))}?" if near else f"sections: {sections}"
        raise UnknownComponentError(f"the configuration has no section or key {section!r}; {hint}")
    return chosen


def table(found: Sequence[ConfigKey]) -> Table:
    """Return settings as a readable table."""
    rows = borderless(show_header=False, expand=True)
    rows.add_column(ratio=5, overflow="fold")
    rows.add_column(ratio=6, overflow="fold")
    for setting in found:
        default = "" if setting.section and setting.default is not None else f" = {shown_default(setting)}"
        if setting.required:
            default = ", required"
        value = f"{setting.type_name}{default}{f', {setting.unit}' if setting.unit else ''}"
        key = Group(Text(setting.path, style="cyan"), Padding(Text(value, style="dim"), (0, 0, 0, 2)))
        rows.add_row(key, escape(setting.help))
    return rows


def shown_default(setting: ConfigKey) -> str:
    """Return the default of a setting as written in a configuration."""
    if setting.default in ((), "") or (isinstance(setting.default, str) and "\n" in setting.default):
        return json.dumps(setting.default)
    return brief(setting.default)


def described(setting: ConfigKey) -> dict[str, Any]:
    """Return a setting as plain values."""
    return {
        "path": setting.path,
        "type": setting.type_name,
        "required": setting.required,
        "default": None if setting.required or setting.section else listing.plain(setting.default),
        "unit": setting.unit or None,
        "help": setting.help,
    }
