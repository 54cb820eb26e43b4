"""Names of plugins: entry points in package metadata, read without importing; functions named by file or module."""

from __future__ import annotations

import hashlib
import importlib.metadata
import importlib.util
import os
import re
import sys
from functools import cache, lru_cache
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

import attrs

from rlsdk.errors import ValueFault, described
from rlsdk.options import did_you_mean
from rlsdk.plugins.guard import import_module, imported

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
    for point, distribution, release in _declared(GROUP, _search_path()):
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
    return tuple(point for point, _, _ in _declared(group, _search_path()))


@lru_cache(maxsize=8)
def _declared(
    group: str, searched: tuple[tuple[str, int], ...]
) -> tuple[tuple[importlib.metadata.EntryPoint, str, str], ...]:
    """Read the metadata of all installed packages, hundreds of files; cached until a package is added or removed.

    Each entry point comes with the name and version of its distribution, which are parsed again whenever they are read.
    """
    points = importlib.metadata.entry_points(group=group)
    owned = [(p, p.dist.name, p.dist.version) if p.dist else (p, "", "") for p in points]
    return tuple(sorted(owned, key=lambda each: (each[0].name, each[1])))


def _search_path() -> tuple[tuple[str, int], ...]:
    """Return the entries of `sys.path`, each with the time when a file was last added to it or removed."""
    return tuple((path, _changed(path)) for path in sys.path)


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
    # the contents of an editable install are unknown
    listing = f", and {entry.distribution} holds: {', '.join(sorted(held))}." if held else "."
    hint = did_you_mean(entry.module, held) or listing
    return (
        f'; the entry point {entry.name!r} names it{hint} Correct [project.entry-points."rlsdk.v1"] in its '
        "pyproject.toml, and install it again"
    )


def misspelt_group(name: str) -> str:
    """Return advice if an installed package declares a plugin in a group of rlsdk's that is not read; else nothing."""
    for point in importlib.metadata.entry_points(name=name):
        read = point.group == GROUP or point.group.startswith(f"{GROUP}.")
        if point.group.lower().startswith("rlsdk") and not read and point.dist:
            origin = f"{point.dist.name} {point.dist.version}"
            declares = f"\n{origin} declares {name!r} in the group {point.group!r}, which rlsdk does not read; "
            if re.fullmatch(r"rlsdk\.v\d+", point.group):
                return (
                    f"{declares}rlsdk {version()} reads {GROUP!r}, the plugin API for which it must be written: "
                    f"install another version of rlsdk or of {point.dist.name}, or correct the group if it is misspelt"
                )
            return f'{declares}write [project.entry-points."{GROUP}"] in its pyproject.toml, and install it again'
    return ""


def impostors() -> str:
    """Return advice about installed packages that declare a plugin `core`, whose components no config can name."""
    origins = [
        claim.origin for claims in discover().values() for claim in claims if claim.name == CORE and claim.broken
    ]
    if not origins:
        return ""
    return (
        f"\n{' and '.join(origins)} also declares {CORE!r}, which belongs to rlsdk; give its entry point another "
        "name in its pyproject.toml, and install it again"
    )


@cache
def version() -> str:
    """Return the installed version of rlsdk."""
    try:
        return importlib.metadata.version("rlsdk")
    except importlib.metadata.PackageNotFoundError:
        return "0+source"


def short_name(name: Any) -> str:
    """Return a component's name as written in configurations: built-in ones without `core/`."""
    return str(name).removeprefix(f"{CORE}/")


def find(path: str) -> Any:
    """Import the object at a path such as `my_file.py:fn`, `package.module:fn` or `my_file.py:object.method`.

    Args:
        path: File relative to the working folder, or importable module; after the colon, a name in it.

    Raises:
        ValueFault: The object cannot be found or imported; the message has the cause.
    """
    place, colon, name = path.rpartition(":")
    if not colon or not place or not name:
        raise ValueFault(f"expected FILE.py:FUNCTION or package.module:FUNCTION, got {path!r}")
    found: Any = _from_file(place) if place.endswith(".py") else _from_package(place)
    for part in name.split("."):
        if not hasattr(found, part):
            raise ValueFault(f"{place} has no {name!r}{_offered(found, part)}")
        found = getattr(found, part)
    return found


def unreadable(path: str | Path, error: OSError | UnicodeDecodeError) -> str:
    """Return a sentence about an unreadable Python file, with the nearest file name in its folder."""
    path = Path(path)
    cause = error.strerror if isinstance(error, OSError) else error
    where = "" if path.is_absolute() else f" (working folder: {Path.cwd().name}/)"
    siblings = [] if path.exists() else [file.name for file in path.expanduser().parent.glob("*.py")]
    return f"{path} cannot be read: {cause}{where}{did_you_mean(path, siblings)}"


def _offered(holder: Any, name: str) -> str:
    """List what a module or an object has in place of a missing name; imports only if there is nothing else."""
    public = [key for key in dir(holder) if not key.startswith("_")]
    own = public
    if isinstance(holder, ModuleType):
        values = {key: getattr(holder, key) for key in public if not isinstance(getattr(holder, key), ModuleType)}
        own = [
            key
            for key, value in values.items()
            if not isinstance(value, type | FunctionType) or value.__module__ == holder.__name__
        ]
    names = sorted(own or public)
    return f"{did_you_mean(name, names, ', ')}; it has: {', '.join(names[:12]) or 'nothing'}"


def _from_package(name: str) -> ModuleType:
    try:
        return import_module(name, f"module {name}")
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # also SystemExit, or the panic of a library in Rust
        file = f"{name.replace('.', '/')}.py"
        hint = f"; for the file in the working folder, write {file}" if Path(file).is_file() else ""
        raise ValueFault(f"module {name} cannot be imported: {described(error)}{hint}") from error


def _from_file(place: str) -> ModuleType:
    file = Path(place).expanduser().absolute()
    try:
        source = file.read_bytes()
    except OSError as error:
        raise ValueFault(unreadable(place, error)) from error
    try:
        with imported(place):
            return _module(file, hashlib.sha256(source).hexdigest())
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # also SystemExit, or the panic of a library in Rust
        raise ValueFault(f"{place} cannot be imported: {described(error)}") from error


@lru_cache(maxsize=64)
def _module(file: Path, digest: str) -> ModuleType:
    """Load a file as a separate module, executed once per content; modules in the same folder can be imported."""
    name = f"_rlsdk_foreign_{file.stem}_{hashlib.sha256(f'{file}{digest}'.encode()).hexdigest()[:12]}"
    spec = importlib.util.spec_from_file_location(name, file)
    if spec is None or spec.loader is None:
        raise ImportError(f"{file.name} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses and pickle look there
    sys.path.append(str(file.parent))
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    finally:
        sys.path.remove(str(file.parent))
    return module
