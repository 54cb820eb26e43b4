"""Plugins as declared in package metadata, without importing them."""

from __future__ import annotations

import importlib.metadata
import os
import sys
from functools import lru_cache
from typing import Any

import attrs

from rlsdk.options import nearest

GROUP = "rlsdk.v1"
CORE = "core"
"""Name of the plugin with rlsdk's built-in components."""
CORE_MODULE = "rlsdk.builtins"


@attrs.frozen
class PluginEntry:
    """A plugin, read from package metadata without importing it.

    Attributes:
        name: Name of the entry point, the prefix of its components.
        module: Dotted name of the module, or the path of a single file.
        distribution: The distribution that declares it; empty for a single file.
        version: Version of that distribution.
        broken: Reason why it cannot be used; empty if no problem is known.
        file: True if `module` is a path.
    """

    name: str
    module: str
    distribution: str = ""
    version: str = ""
    broken: str = ""
    file: bool = False

    @property
    def origin(self) -> str:
        """Distribution and version, or file path, for messages."""
        return self.module if self.file else f"{self.distribution} {self.version}".strip()


def discover() -> dict[str, tuple[PluginEntry, ...]]:
    """Return the plugins that package metadata declares, by name, `core` first.

    Returns:
        Name -> all entries that claim it. A foreign `core` is included as broken, under a name that configurations
        cannot use.
    """
    found: dict[str, list[PluginEntry]] = {CORE: [PluginEntry(CORE, CORE_MODULE, "rlsdk", version())]}
    seen: set[tuple[str, str]] = set()
    for point in declared(GROUP):
        distribution, release = (point.dist.name, point.dist.version) if point.dist else ("", "")
        if (point.name, distribution) in seen or (point.name == CORE and point.value == CORE_MODULE):
            continue  # both an egg-info and a dist-info, or rlsdk itself
        seen.add((point.name, distribution))
        key, broken = point.name, ""
        if point.name == CORE:
            key, broken = f"{CORE} of {distribution}", f"the name {CORE!r} belongs to rlsdk; choose another"
        elif "/" in point.name or point.name.endswith(".py"):
            broken = "its name holds '/' or ends in '.py', so that no config can write it; choose another"
        found.setdefault(key, []).append(PluginEntry(point.name, point.module, distribution, release, broken))
    return {name: tuple(claims) for name, claims in found.items()}


def declared(group: str) -> tuple[importlib.metadata.EntryPoint, ...]:
    """Return the entry points of a group, sorted by name and distribution, independent of the search path's order."""
    return _declared(group, tuple((path, _changed(path)) for path in sys.path))


@lru_cache(maxsize=8)
def _declared(group: str, searched: tuple[tuple[str, int], ...]) -> tuple[importlib.metadata.EntryPoint, ...]:
    """Read the metadata of all installed packages, hundreds of files; cached until a package is added or removed."""
    points = importlib.metadata.entry_points(group=group)
    return tuple(sorted(points, key=lambda p: (p.name, p.dist.name if p.dist else "")))


def _changed(folder: str) -> int:
    """Return when an entry of a search path folder was last added or removed; 0 if the folder does not exist."""
    try:
        return os.stat(folder or ".").st_mtime_ns
    except OSError:
        return 0


def misspelt_module(entry: PluginEntry) -> str:
    """Return advice for an entry point whose module is missing from its distribution."""
    files = importlib.metadata.files(entry.distribution) or ()
    held = {path.parts[0].removesuffix(".py") for path in files if path.suffix == ".py"}
    near = nearest(entry.module, held)
    # the contents of an editable install are unknown
    listing = f", and {entry.distribution} holds: {', '.join(sorted(held))}." if held else "."
    hint = f"; did you mean {near!r}?" if near else listing
    return (
        f'; the entry point {entry.name!r} names it{hint} Correct [project.entry-points."rlsdk.v1"] in its '
        "pyproject.toml, and install it again"
    )


def version() -> str:
    """Return the installed version of rlsdk."""
    try:
        return importlib.metadata.version("rlsdk")
    except importlib.metadata.PackageNotFoundError:
        return "0+source"


def short_name(name: Any) -> str:
    """Return a component's name as written in configurations: built-in ones without `core/`."""
    return str(name).removeprefix(f"{CORE}/")
