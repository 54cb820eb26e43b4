"""Settings of runs, in a form in which those of several runs can be compared."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

from rlsdk.components import Use
from rlsdk.config.paths import absolute_paths, noted_folder
from rlsdk.config.reference import settings
from rlsdk.config.schema import LISTS
from rlsdk.config.tree import as_tree, leaves, plain, spelled_out
from rlsdk.errors import PluginError
from rlsdk.kinds import PARTS, Kind
from rlsdk.options import MISSING
from rlsdk.plugins import Plugins
from rlsdk.reporting.report import FinishedRun


def comparable(runs: Sequence[FinishedRun]) -> list[dict[str, Any]]:
    """Return the settings of each run by path: all that any of the runs gives, defaults included.

    Paths of files can be compared even if the runs were started in different folders.
    """
    folders = [noted_folder(run.config_text, run.folder) for run in runs]
    known = None not in folders
    found = [
        dict(leaves(absolute_paths(spelled_out(run.config), folder if known else None)))
        for run, folder in zip(runs, folders, strict=True)
    ]
    paths = {path for each in found for path in each}
    return [{**_defaults(each, paths - each.keys()), **each} for each in found]


def _defaults(given: Mapping[str, Any], wanted: Collection[str]) -> dict[str, Any]:
    """Return the known ones of the wanted defaults of a run that gives some settings."""
    # A value or schedule that is given replaces all that the default has at its path, and below it.
    free = {path for path in wanted if not any(_below(path, each) or _below(each, path) for each in given)}
    if not free:
        return {}
    found = {**dict(_keys(given)), **dict(_options(given))}
    return {path: found[path] for path in free & found.keys()}


def _below(path: str, other: str) -> bool:
    return path.startswith((f"{other}.", f"{other}["))


def _keys(given: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield the defaults of keys that do not depend on components; sections that are null have none."""
    keys = settings()
    nullable = [key.path for key in keys if key.section and key.default is None]
    null = [path for path in nullable if not any(_below(each, path) for each in given)]
    for key in keys:
        if key.kind or key.section or key.default is MISSING or any(_below(key.path, path) for path in null):
            continue
        section, _, name = key.path.rpartition(".")
        paths = [f"{each}.{name}" for each in _members(section, given)] if section in LISTS else [key.path]
        for path in paths:
            yield from leaves(plain(as_tree(key.default)), path)


def _members(path: str, given: Mapping[str, Any]) -> list[str]:
    """Return the paths of the members of a list of components."""
    return [each.removesuffix(".use") for each in given if each.startswith(f"{path}[") and each.endswith("].use")]


def _options(given: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield the defaults of components and of their options."""
    plugins = Plugins()
    for key in settings():
        for path in _members(key.path, given) if key.path in LISTS else [key.path]:
            if key.kind:
                default = key.default if isinstance(key.default, Use) else None
                yield from _component(path, key.kind, default, given, plugins)


def _component(
    path: str, kind: Kind, default: Use | None, given: Mapping[str, Any], plugins: Plugins
) -> Iterator[tuple[str, Any]]:
    name = given.get(f"{path}.use", default and default.name)
    if not isinstance(name, str) or not name.isidentifier():  # a comparison executes no code of files and plugins
        return
    yield f"{path}.use", name
    try:
        _, component = plugins.find(kind, name)
    except PluginError:  # of another version of rlsdk
        return
    own = default.options if default and default.name == name else {}
    for option in component.options:
        below, value = f"{path}.{option.name}", own.get(option.name, option.default)
        if kind == "algorithm" and option.name in PARTS:
            yield from _component(below, PARTS[option.name], value if isinstance(value, Use) else None, given, plugins)
        elif value is not MISSING:
            yield from leaves(plain(as_tree(value)), below)
