"""Functions for scripts: list installed components, and load one."""

from __future__ import annotations

import functools
from typing import Any

from rlsdk.components import Use
from rlsdk.errors import OptionError, PluginError, option_path
from rlsdk.kinds import Kind
from rlsdk.options import Fault
from rlsdk.plugins.discovery import CORE
from rlsdk.plugins.manager import Plugins, check_kind, present


@functools.cache
def _default() -> Plugins:
    return Plugins()


def find_plugins_again() -> None:
    """Make `rlsdk.load` and `rlsdk.names` rediscover installed plugins, after a test installed or removed some."""
    _default.cache_clear()


def load(kind: Kind, name: Any, /, **options: Any) -> Any:
    """Load a component by name, or a marked object, check its options, and instantiate it.

    A component that loads another during instantiation finds it among the plugins of its run, including files.

    Args:
        kind: Kind of component, such as "reward", "advantage", "policy_loss".
        name: `grpo` (built in), `mylab/exact` (from a plugin), or a marked object.
        **options: Options that the component declares.

    Returns:
        A callable that takes the positional arguments of its kind, or an instance of the component's class.

    Raises:
        UnknownComponentError: No such kind, plugin or component.
        OptionError: An option is unknown, missing or of the wrong type.
        PluginError: The plugin is broken.
    """
    plugins = present() or _default()
    return plugins.resolve(plugins.reference(kind, name, options))


def faults_of(kind: Kind, use: Use, path: str) -> list[Fault]:
    """Find the faults of a component named by an option."""
    try:
        made = load(kind, use.name, **use.options)
    except OptionError as error:
        return [(option_path(path, below), text) for below, text in error.faults]
    except PluginError as error:
        return [(path, str(error))]
    if hasattr(made, "close"):
        made.close()
    return []


def names(kind: Kind) -> list[str]:
    """Return the names of all installed components of a kind, with plugin prefixes; broken plugins are skipped."""
    check_kind(kind)
    plugins = _default()
    found = plugins.names(kind)
    for plugin in plugins.entries:
        if plugin == CORE:
            continue
        try:
            found += [f"{plugin}/{name}" for name in plugins.names(kind, plugin)]
        except PluginError:  # `rlsdk plugins` reports broken plugins; their components cannot be loaded
            continue
    return found
