"""Resolve names of an algorithm's parts: components of its own plugin take precedence over built-in ones."""

from __future__ import annotations

import sys
from collections.abc import Container
from typing import TYPE_CHECKING, Any

import attrs

from rlsdk.components import Use, component_of
from rlsdk.kinds import PART_LISTS, PARTS, Kind
from rlsdk.plugins.discovery import CORE

if TYPE_CHECKING:
    from rlsdk.plugins.manager import Plugins


def with_own_parts(plugins: Plugins, plugin: str, algorithm: Any, *, given: Container[str] = ()) -> Any:
    """Return the algorithm with full names for the parts that its own plugin offers.

    A bare name, or a marked object of the plugin, becomes `plugin/name`; all other parts are unchanged. If the
    algorithm was passed as an object, a bare name becomes the marked object of its module.

    Args:
        plugins: The plugins of the run.
        plugin: The algorithm's plugin; empty for an algorithm passed as an object.
        algorithm: An instance of the algorithm's class.
        given: Fields set by the configuration, where a bare name refers to a built-in component.

    Raises:
        PluginError: The plugin cannot be imported.
    """
    if plugin == CORE:
        return algorithm
    declared = {} if plugin else _declared(type(algorithm).__module__)
    changes: dict[str, Any] = {}
    for part, kind in {**PARTS, **PART_LISTS}.items():
        value = getattr(algorithm, part, None)
        if part in given or not value:
            continue
        many = isinstance(value, tuple)
        uses = value if many else (value,)
        if plugin:
            found = tuple(_with_prefix(plugins, plugin, kind, use) for use in uses)
        else:
            found = tuple(Use(declared.get((kind, str(use.name)), use.name), use.options) for use in uses)
        changes[part] = found if many else found[0]
    return attrs.evolve(algorithm, **changes)


def _declared(module: str) -> dict[tuple[Kind, str], Any]:
    """Return the marked objects that a module defines, by kind and name."""
    objects = vars(sys.modules[module]).values() if module in sys.modules else ()
    own = ((component_of(obj), obj) for obj in list(objects) if getattr(obj, "__module__", None) == module)
    return {(component.kind, component.name): obj for component, obj in own if component is not None}


def _with_prefix(plugins: Plugins, plugin: str, kind: Kind, use: Use) -> Use:
    offered = plugins.components(plugin, kind)
    component = None if isinstance(use.name, str) else component_of(use.name)
    name = use.name if component is None else component.name
    offer = offered.get((kind, name))
    if offer is None or (component is not None and offer is not component):
        return use
    return Use(f"{plugin}/{name}", use.options)
