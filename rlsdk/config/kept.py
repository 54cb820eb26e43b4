"""The configuration saved in a run's folder: names in place of marked objects, and the files with their sources."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import attrs

from rlsdk.components import Bound, Component, component_of
from rlsdk.config.plan import Plan
from rlsdk.config.tree import plain
from rlsdk.plugins import Plugins, short_name

_PLUGIN_FILE = re.compile(r"^# plugin (\S+): file (.+), source \w+$", re.MULTILINE)
CODE = "code"
"""Subfolder of a run's folder with the sources of marked objects."""


@attrs.frozen
class KeptConfig:
    """A configuration as plain values.

    Attributes:
        tree: The values; a marked object is replaced by the name of a component of a plugin in `files`.
        files: Name of a plugin -> its source.
        lost: Marked objects whose source cannot be saved.
    """

    tree: dict[str, Any]
    files: Mapping[str, str]
    lost: tuple[str, ...]


def kept_config(plan: Plan) -> KeptConfig:
    """Return the configuration to save in the folder of a plan's run."""
    lost: list[str] = []
    tree = plain(_named(plan.tree, plan.plugins, lost))
    files = plan.plugins.kept_sources()
    given = [_within(each, plan.folder) for each in tree.get("plugins") or []]
    own = [f"{CODE}/{name}.py" for name in files]
    if plugins := list(dict.fromkeys([*given, *own])):
        tree["plugins"] = plugins
    return KeptConfig(tree, files, tuple(lost))


def _named(value: Any, plugins: Plugins, lost: list[str]) -> Any:
    """Replace marked objects in a tree by names, and record those that have none."""
    if isinstance(value, Mapping):
        return {key: _named(below, plugins, lost) for key, below in value.items()}
    if isinstance(value, list | tuple):
        return [_named(below, plugins, lost) for below in value]
    component = component_of(value)
    if component is None:
        return value
    name = _name(component, plugins)
    if name is None:
        lost.append(f"{component.kind} {component.name!r}")
        return value
    return {"use": name, **_named(value.options, plugins, lost)} if isinstance(value, Bound) and value.options else name


def _name(component: Component, plugins: Plugins) -> str | None:
    """Return the name of a marked object in configurations; None if its source cannot be saved."""
    if kept := plugins.kept_name(component.obj):
        return f"{kept}/{component.name}"
    for plugin in plugins.entries:
        if plugins.offers(plugin, component):
            return short_name(f"{plugin}/{component.name}")
    return None


def _within(plugin: Any, folder: Path) -> str:
    """Return the path of a file relative to the run's folder that contains it."""
    path = Path(str(plugin)).absolute()
    inside = path.suffix == ".py" and path.is_relative_to(folder.absolute())
    return path.relative_to(folder.absolute()).as_posix() if inside else str(plugin)


def plugin_files(text: str) -> dict[str, str]:
    """Return the plugin files that the `config.yaml` of a run notes: name -> file."""
    return dict(_PLUGIN_FILE.findall(text))
