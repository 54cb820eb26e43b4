"""A JSON schema of configurations, with which editors complete and document keys, and mark mistakes.

It uses draft 7, the newest that editors' YAML servers implement in full. Checks that depend on several values, or on
files, are left to `rlsdk explain`.
"""

from __future__ import annotations

import math
import types
from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from rlsdk.components import Component, NamesKind, Use
from rlsdk.config import defaults
from rlsdk.config.reference import DEFAULTS, extra_keys, limited, section_of
from rlsdk.config.rules import LEAST
from rlsdk.config.schema import COMPONENT_KEYS, LISTS, Config
from rlsdk.config.tree import RENAMED
from rlsdk.kinds import COMBINED, PART_LISTS, PARTS, Kind
from rlsdk.limits import Limit
from rlsdk.options import Option, options_of
from rlsdk.schedules import EntropyTarget

Schema = dict[str, Any]
DRAFT = "http://json-schema.org/draft-07/schema#"
INTERPOLATION: Schema = {"type": "string", "pattern": r"\$\{"}
"""`${…}` is allowed in place of any value."""
FOREIGN_NAME: Schema = {"type": "string", "pattern": r"[/:]|\$\{|\.py$"}
"""Component name that the schema cannot know: from a plugin or file, or with an interpolation."""
SCALARS: Mapping[Any, Schema] = {
    bool: {"type": "boolean"},
    int: {"type": "integer"},
    float: {"type": "number"},
    str: {"type": "string"},
    type(None): {"type": "null"},
}
LIMITS = {">=": "minimum", ">": "exclusiveMinimum", "<=": "maximum", "<": "exclusiveMaximum"}
SCHEDULE: Schema = {
    "type": "object",
    "required": ["from", "to", "over"],
    "properties": {
        "from": {"description": "Value at the first training step."},
        "to": {"description": "Value after `over` training steps, and from then on."},
        "over": {"description": "Number of training steps that the change takes.", "type": "integer", "minimum": 1},
        "shape": {"enum": ["linear", "cosine"], "default": "linear"},
    },
    "additionalProperties": False,
}
Components = Mapping[Kind, Mapping[str, Component]]
"""Kind -> name in configurations -> component."""


def json_schema(components: Components) -> Schema:
    """Return the schema of configurations that use the given components.

    Args:
        components: Kind -> name -> component, of rlsdk and of installed plugins.
    """
    writer = _Writer(components)
    return {
        "$schema": DRAFT,
        "title": "Configuration of an rlsdk run",
        **writer.section(Config, ""),
        "definitions": writer.definitions(),
    }


class _Writer:
    """Writes schemas that refer to components by definitions."""

    def __init__(self, components: Components) -> None:
        self.components = components

    def definitions(self) -> Schema:
        """Return the targets of `$ref`: each kind of component, and the options of each component."""
        target = self.section(EntropyTarget, "-.")
        found: Schema = {"interpolation": INTERPOLATION, "schedule": SCHEDULE, "entropy_target": target}
        for kind, named in self.components.items():
            extra = _extra_keys(kind)
            found[kind] = self.chosen(kind)
            for name, component in named.items():
                found[f"{kind}.{name}"] = self.options(component, extra)
        return found

    def chosen(self, kind: Kind) -> Schema:
        """Return the schema of a component: its name, or a mapping with `use` and options."""
        named = sorted(self.components.get(kind, {}))
        groups = [defaults.DIAGNOSES.name] if kind == "diagnosis" else []
        name = {"anyOf": [{"enum": [*groups, *named]}, FOREIGN_NAME]}
        cases = [
            {
                "if": {"properties": {"use": {"const": each}}},
                "then": _component(kind, each),
            }
            for each in named
        ]
        mapping = {"type": "object", "required": ["use"], "properties": {"use": name}, "allOf": cases}
        return {"anyOf": [name, mapping]}

    def chosen_or(self, kind: Kind, default: Any) -> list[Schema]:
        """Return the schemas of a component, and of options without `use`, which are those of `default`."""
        found: list[Schema] = [{"$ref": f"#/definitions/{kind}"}]
        if default in self.components.get(kind, {}):
            alone: Schema = {"not": {"required": ["use"]}}
            found.append({"allOf": [alone, _component(kind, default)]})
        return found

    def options(self, component: Component, extra: Sequence[Option]) -> Schema:
        """Return the schema of a mapping with `use` and the options of a component."""
        own = {option.name: option for option in (*extra, *component.options)}
        parts = {**PARTS, **PART_LISTS} if component.kind == "algorithm" else {}
        properties = {
            name: self.part(option, parts[name]) if name in parts else self.option(option)
            for name, option in own.items()
        }
        if component.kind == "algorithm":
            properties["entropy_coef"]["anyOf"].append({"$ref": "#/definitions/entropy_target"})
        if component.kind == "reward":  # a single source needs no list
            properties["sources"]["anyOf"].append({"type": "string"})
        return {
            "type": "object",
            "description": component.summary,
            "required": [option.name for option in own.values() if option.required],
            "properties": {"use": {"type": "string"}, **properties},
            "additionalProperties": False,
        }

    def part(self, option: Option, kind: Kind) -> Schema:
        """Return the schema of a part of an algorithm; options without `use` override those of the algorithm's part."""
        if option.name in PART_LISTS:
            return {**_about(option), **_list_of({"$ref": f"#/definitions/{kind}"})}
        default = option.default.name if isinstance(option.default, Use) else None
        null = [{"type": "null"}] if type(None) in get_args(option.type) else []
        several = [{"type": "array", "items": {"$ref": f"#/definitions/{kind}"}}] if option.name in COMBINED else []
        return {**_about(option), "anyOf": [*self.chosen_or(kind, default), *several, *null]}

    def option(self, option: Option, least: float | None = None) -> Schema:
        """Return the schema of an option or a key with a plain value."""
        kinds = [self.value(limited(option.type, least))]
        if option.schedule:
            kinds.append({"$ref": "#/definitions/schedule"})
        return {**_about(option), **_or_interpolation(kinds)}

    def value(self, kind: Any) -> Schema:
        """Return the schema of a type; {} if it allows anything, or has its own notation."""
        origin, args = get_origin(kind), get_args(kind)
        if kind in SCALARS:
            return dict(SCALARS[kind])
        if origin is Annotated:
            if named := [note.kind for note in args[1:] if isinstance(note, NamesKind)]:
                return {"$ref": f"#/definitions/{named[0]}"}
            found = [note for note in args[1:] if isinstance(note, Limit) and math.isfinite(note.number)]
            limits = {LIMITS[note.sign]: note.number for note in found}
            return {**self.value(args[0]), **limits}
        if origin is Literal:
            return {"enum": list(args)}
        if origin in (Union, types.UnionType):
            arms = [self.value(arm) for arm in args]
            return {"anyOf": arms} if all(arms) else {}
        if origin in (list, tuple) or (isinstance(origin, type) and issubclass(origin, Sequence)):
            fixed = origin is tuple and args[-1] is not Ellipsis
            size = {"minItems": len(args), "maxItems": len(args)} if fixed else {}
            return {"type": "array", "items": _or_interpolation([self.value(args[0])]) if args else {}, **size}
        if isinstance(origin, type) and issubclass(origin, Mapping):
            return {"type": "object"}
        return self.section(kind, "-.") if section_of(kind) is kind and isinstance(kind, type) else {}

    def section(self, cls: type, prefix: str) -> Schema:
        """Return the schema of a mapping with the keys of a class."""
        options = options_of(cls)
        properties = {option.name: self.key(option, f"{prefix}{option.name}") for option in options}
        if cls is Config:
            properties |= {old: {"deprecationMessage": f"now {new}", **properties[new]} for old, new in RENAMED.items()}
        return {
            "type": "object",
            "required": [option.name for option in options if option.required],
            "properties": properties,
            "additionalProperties": False,
        }

    def key(self, option: Option, path: str) -> Schema:
        """Return the schema of the value at a path of a configuration."""
        about = _about(option)
        if path in COMPONENT_KEYS:
            null = [{"type": "null"}] if type(None) in get_args(option.type) else []
            default = DEFAULTS[path].name if path in DEFAULTS else None
            return {**about, "anyOf": [*self.chosen_or(COMPONENT_KEYS[path], default), *null]}
        if path in LISTS:
            return {**about, **_list_of({"$ref": f"#/definitions/{LISTS[path]}"})}
        if path == "plugins":
            return {**about, **_list_of({"type": "string"})}
        inner = section_of(option.type)
        if inner is None:
            return self.option(option, LEAST.get(path))
        alone: list[Schema] = [{"type": "string"}] if path == "model" else []
        nothing: list[Schema] = [{"type": "null"}] if inner is not option.type else []
        return {**about, **_or_interpolation([self.section(inner, f"{path}."), *alone, *nothing])}


def _component(kind: Kind, name: str) -> Schema:
    """Return a reference to a component's definition; the name may contain a slash."""
    return {"$ref": f"#/definitions/{kind}.{name.replace('/', '~1')}"}


def _extra_keys(kind: Kind) -> Sequence[Option]:
    """Return the keys allowed next to the options of a component."""
    for path, listed in LISTS.items():
        if listed == kind:
            section, _, key = path.partition(".")
            owner: Any = Config if not key else section_of({o.name: o for o in options_of(Config)}[section].type)
            return extra_keys({o.name: o.type for o in options_of(owner)}[key or section])
    return ()


def _list_of(item: Schema) -> Schema:
    """Return the schema of a list, a single item, or null for an empty list."""
    return {"anyOf": [item, {"type": "array", "items": item}, {"type": "null"}]}


def _or_interpolation(kinds: Iterable[Schema]) -> Schema:
    """Return a schema that allows any of `kinds`, or an interpolation."""
    found = [arm for kind in kinds for arm in (kind["anyOf"] if set(kind) == {"anyOf"} else [kind])]
    if {} in found:
        return {}
    if {"type": "string"} in found:
        return found[0] if len(found) == 1 else {"anyOf": found}
    return {"anyOf": [*found, {"$ref": "#/definitions/interpolation"}]}


def _about(option: Option) -> Schema:
    """Return the description and default of an option, as far as JSON can express them."""
    default = list(option.default) if isinstance(option.default, tuple) else option.default
    plain = isinstance(default, str | int | float | bool | None) or default == []
    return {
        **({"description": option.help} if option.help else {}),
        **({"default": default} if plain and not option.required else {}),
    }
