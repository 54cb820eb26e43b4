"""Plugins: discovered from package metadata, imported when named, resolved to one component per name.

A distribution declares an entry point in the group `rlsdk.v1`; its name is the prefix of its components
(`mylab/exact`). A bare name means `core/NAME`. A single file is a plugin named by its stem.
"""

from __future__ import annotations

import functools
from typing import Any

from rlsdk.components import Kind
from rlsdk.errors import PluginError
from rlsdk.plugins.entries import CORE, GROUP, Entry, discover, version
from rlsdk.plugins.fingerprints import Fingerprint, Reference
from rlsdk.plugins.manager import Plugins, check_kind

__all__ = [
    "CORE",
    "GROUP",
    "Entry",
    "Fingerprint",
    "Plugins",
    "Reference",
    "discover",
    "load",
    "names",
    "version",
]


@functools.cache
def _default() -> Plugins:
    return Plugins()


def load(kind: Kind, name: Any, /, **options: Any) -> Any:
    """What is ready to run: a component by name, or a marked object, with its options checked.

    Args:
        kind: Such as "reward", "advantage", "policy_loss".
        name: `grpo` (built in), `mylab/exact` (of a plugin), or a marked object.
        **options: As the component declares them.

    Returns:
        A callable that takes the positional arguments of its kind, or an instance of the component's class.

    Raises:
        UnknownComponentError: No such kind, plugin or component.
        OptionError: An option is unknown, missing or of the wrong type.
        PluginError: The plugin is broken.
    """
    plugins = _default()
    return plugins.resolve(plugins.reference(kind, name, options))


def names(kind: Kind) -> list[str]:
    """Names of all installed components of a kind, those of plugins with their prefix; broken plugins are left out."""
    check_kind(kind)
    plugins = _default()
    found = plugins.names(kind)
    for plugin in plugins.entries:
        if plugin == CORE:
            continue
        try:
            found += [f"{plugin}/{name}" for name in plugins.names(kind, plugin)]
        except PluginError:  # `rlsdk plugins` says what is broken; a name of it cannot be loaded
            continue
    return found
