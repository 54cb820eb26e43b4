"""The configuration saved in a run's folder, with the sources of its objects; and code that a configuration names."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs

from rlsdk.components import Bound, Component, component_of
from rlsdk.config.plan import Plan
from rlsdk.config.tree import leaves, normalise, plain
from rlsdk.errors import ConfigError
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


_FUNCTION = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_][\w.-]*")
_WORD = re.compile(r"[\w+-]*")
"""Text that can only name a core component, or an installed module without a dot."""


def named_code(tree: Mapping[str, Any]) -> dict[str, str]:
    """Find the code that a configuration names, except installed plugins.

    Returns:
        Path -> value: `FILE.py`, `FILE.py:function`, `module:function`, and `trust_remote_code: true`.
    """
    found = {}
    for path, value in leaves(normalise(dict(tree))):
        if isinstance(value, str):
            file = (value.rpartition(":")[0] or value).endswith(".py")
            if file or _FUNCTION.fullmatch(value):
                found[path] = value
        elif value is True and path.rpartition(".")[2] == "trust_remote_code":
            found[path] = "true"
    return found


def other_plugins(tree: Mapping[str, Any], plugins: Iterable[str | Path]) -> list[Any]:
    """Return the plugins of a saved configuration without those that the user's files of the same name replace."""
    given = {Path(file).stem for file in plugins}
    return [each for each in tree.get("plugins") or [] if Path(str(each)).stem not in given]


def require_trusted(
    file: Path, tree: Mapping[str, Any], plugins: Sequence[str | Path], named: Mapping[str, Any], advice: str
) -> None:
    """Refuse a run's saved configuration that names code which the user did not name.

    Args:
        file: File of the configuration.
        tree: The configuration.
        plugins: Files of plugins given by the user; they replace those of the same name, and whatever the configuration
            names in them is trusted.
        named: Configuration given by the user.
        advice: Why the code would be executed, and what to do.

    Raises:
        ConfigError: Lists the code.
    """
    trusted, files = set(named_code(named).values()), {Path(each).absolute() for each in plugins}
    found = named_code({**tree, "plugins": other_plugins(tree, plugins)})
    faults = [
        f"{_described(path, value)} was not in what you gave"
        for path, value in found.items()
        if value not in trusted and Path(value.rpartition(":")[0]).absolute() not in files
    ]
    if faults:
        raise ConfigError([f"{file}: {advice}", *faults])


def _described(path: str, value: str) -> str:
    """Return a line with the path where a configuration names code, and the hash of its file."""
    file = Path(value if value.endswith(".py") else value.rpartition(":")[0]).expanduser()
    if file.suffix != ".py":
        return f"{path}: {value}"
    try:
        digest = f"sha256 {hashlib.sha256(file.read_bytes()).hexdigest()[:16]}"
    except OSError as error:
        digest = str(error.strerror)
    return f"{path}: {value} ({digest})"


def names_only(tree: Mapping[str, Any], known: Mapping[str, Any], harmless: Collection[str]) -> bool:
    """Return whether checking a configuration executes no code beyond that named by a known one.

    Args:
        tree: Configuration to examine.
        known: Configuration whose code may be executed.
        harmless: Paths whose values never name code.

    Returns:
        False if `tree` contains text that may name code and does not occur in `known`.
    """
    names = set(_texts(known, ()))
    return all(text in names or _WORD.fullmatch(text) for text in _texts(tree, harmless))


def _texts(tree: Mapping[str, Any], left_out: Collection[str]) -> Iterator[str]:
    for path, value in leaves(normalise(dict(tree))):
        if path in left_out or any(path.startswith((f"{known}.", f"{known}[")) for known in left_out):
            continue
        if path.rpartition(".")[2] == "trust_remote_code" and value is not False:
            yield f"trust_remote_code: {value}"
        elif isinstance(value, str):
            yield value
