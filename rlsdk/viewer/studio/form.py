"""Describe the form: every configuration key and every option of the installed components, as plain values."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, Any, Literal, get_args, get_origin

import attrs

from rlsdk.components import Use
from rlsdk.config.reference import ConfigKey, of_component, settings
from rlsdk.config.schema import LISTS
from rlsdk.errors import PluginError
from rlsdk.kinds import KINDS, PART_LISTS, Kind
from rlsdk.plugins import CORE, Plugins

Plain = dict[str, Any]
_SIMPLE: Mapping[Any, str] = {bool: "flag", int: "number", float: "number", str: "text"}


def form_of(files: Iterable[str] = ()) -> Plain:
    """Describe the form.

    Args:
        files: Plugin files to offer in addition to installed plugins, as listed in `plugins`.

    Returns:
        `fields`, the configuration keys; `components`, kind -> name -> summary, plugin and fields; `broken`, messages
        about plugins that cannot be imported.
    """
    plugins = Plugins()
    components: dict[Kind, dict[str, Plain]] = {kind: {} for kind in KINDS}
    broken: list[str] = []
    for name in dict.fromkeys([*plugins.entries, *files]):
        try:
            plugin = plugins.activate(name)
            found = plugins.components(plugin)
        except PluginError as error:
            broken.append(str(error))
            continue
        for key in sorted(found):
            component = found[key]
            shown = component.name if plugin == CORE else f"{plugin}/{component.name}"
            # Below the path `algorithm`, an algorithm's keys are known to be components.
            options = of_component(component, "algorithm" if component.kind == "algorithm" else "-")
            # An option that is a group of options is written as YAML on one line.
            fields = [_field(attrs.evolve(option, section=None)) for option in options]
            described: Plain = {"plugin": plugin, "summary": component.summary, "fields": fields}
            components[component.kind][shown] = described
    return {"fields": _nested(settings()), "components": components, "broken": broken}


def _nested(keys: Sequence[ConfigKey]) -> list[Plain]:
    """Move keys of sections, and keys next to the components of a list, into their parents' `fields`."""
    found = {key.path: _field(key) for key in keys}
    for path, field in found.items():
        parent = path.rpartition(".")[0]
        if parent:
            found[parent].setdefault("fields", []).append(field)
    return [field for path, field in found.items() if "." not in path]


def _field(key: ConfigKey) -> Plain:
    """Describe a key: name, type, default, help, and the widget that sets it."""
    name, arms = key.path.rpartition(".")[2], _arms(key.type)
    kind = key.kind or next((kind for kind in KINDS if kind == name and Use in arms), None)
    widget = _widget(key, name, kind, arms)
    return {
        "name": name,
        "type": key.type_name,
        "widget": widget,
        "nullable": type(None) in arms,
        "required": key.required,
        "default": None if key.required or widget == "section" else plain_value(key.default),
        "help": key.help,
        **({"unit": key.unit} if key.unit else {}),
        **({"kind": kind} if kind else {}),
        **({"choices": list(get_args(_only(arms)))} if widget == "choice" else {}),
    }


def _widget(key: ConfigKey, name: str, kind: Kind | None, arms: Sequence[Any]) -> str:
    if kind:
        return "components" if key.path in LISTS or name in PART_LISTS else "component"
    if key.section:
        return "section"
    only = _only(arms)
    return "choice" if get_origin(only) is Literal else _SIMPLE.get(only, "value")


def _arms(kind: Any) -> list[Any]:
    """Return the types of a union without their limits; for any other type, the type itself."""
    kind = get_args(kind)[0] if get_origin(kind) is Annotated else kind
    if get_origin(kind) is Literal or not get_args(kind) or get_origin(kind) in (list, tuple):
        return [kind]
    arms = get_args(kind) if type(None) in get_args(kind) or Use in get_args(kind) else (kind,)
    return [get_args(arm)[0] if get_origin(arm) is Annotated else arm for arm in arms]


def _only(arms: Sequence[Any]) -> Any:
    """Return the only type of the values besides null; None if there are several."""
    found = [arm for arm in arms if arm is not type(None)]
    return found[0] if len(found) == 1 else None


def plain_value(value: Any) -> Any:
    """Return a default as written in a configuration."""
    if isinstance(value, Use):
        return {"use": plain_value(value.name), **{name: plain_value(each) for name, each in value.options.items()}}
    if attrs.has(type(value)):
        return plain_value(attrs.asdict(value, recurse=False))
    if isinstance(value, list | tuple):
        return [plain_value(each) for each in value]
    if isinstance(value, Mapping):
        return {str(key): plain_value(each) for key, each in value.items()}
    return value if isinstance(value, str | int | float | bool | None) else str(value)
