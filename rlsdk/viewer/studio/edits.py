"""Configuration texts: parse them for the form, and write them back with edits applied.

The form never sends a whole configuration, only the text and the edits, so that numbers keep the digits as written.
"""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from typing import Any

import yaml
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from rlsdk.config.schema import LISTS
from rlsdk.config.tree import current, with_lists
from rlsdk.config.yaml_errors import yaml_fault
from rlsdk.errors import first_line
from rlsdk.kinds import COMBINED, PART_LISTS
from rlsdk.readiness.tasks import PlanFinding

Tree = dict[str, Any]
WIDTH = 110
"""Maximum line width of the YAML, where values can be wrapped."""
_LISTS = (*LISTS, *(f"algorithm.{part}" for part in (*PART_LISTS, *COMBINED)))
_DROPPED = object()


def read_text(text: str) -> tuple[Tree | None, list[PlanFinding]]:
    """Parse a configuration, expanding short forms but not interpolations; None if it has a fault."""
    try:
        loaded = OmegaConf.to_container(OmegaConf.load(io.StringIO(text)), resolve=False) if text.strip() else {}
    except yaml.YAMLError as error:
        return None, [PlanFinding("", f"this is not valid YAML: {yaml_fault(error, text)}")]
    except (OmegaConfBaseException, OSError) as error:  # OSError: a bare number or text
        return None, [PlanFinding("", f"this is not a configuration: {first_line(error)}; expected `key: value` lines")]
    if not isinstance(loaded, dict):
        return None, [
            PlanFinding("", f"this is a value of type {type(loaded).__name__}; expected a mapping at the top level")
        ]
    # Not `normalise`: the next edit would write the names of default components that it adds.
    return with_lists(current({str(key): value for key, value in loaded.items()})), []


class _Dumper(yaml.SafeDumper):
    """Quote texts that OmegaConf would read as numbers, such as `1e-3`, which is text in YAML 1.1."""

    def represent_str(self, data: str) -> yaml.ScalarNode:
        try:
            float(data)
        except ValueError:
            return super().represent_str(data)
        return self.represent_scalar("tag:yaml.org,2002:str", data, style="'")


_Dumper.add_representer(str, _Dumper.represent_str)


def write_text(tree: Tree) -> str:
    """Write a configuration, with short forms where they lose nothing, and small mappings on one line."""
    short = _shortened(tree, "")
    if not short:
        return ""
    return yaml.dump(short, Dumper=_Dumper, sort_keys=False, default_flow_style=None, width=WIDTH, allow_unicode=True)


def edited(tree: Tree, edits: Sequence[Mapping[str, Any]]) -> tuple[Tree, list[PlanFinding]]:
    """Apply the form's edits to a configuration; return it and the faults of edits that cannot be read.

    Args:
        tree: The configuration, with short forms expanded.
        edits: Each has `path`, a list of keys and indices, and `value`, `yaml` (its text), or neither: then the key
            is removed.
    """
    faults = []
    for edit in edits:
        path = [each if isinstance(each, int) else str(each) for each in edit["path"]]
        value, fault = _value(edit)
        if fault:
            faults.append(PlanFinding(dotted(path), fault))
        tree = _put(tree, path, value, "")
    return tree, faults


def dotted(path: Sequence[str | int]) -> str:
    """Format a path as in faults: `reward[0].weight`."""
    return "".join(f"[{each}]" if isinstance(each, int) else f".{each}" for each in path).lstrip(".")


def _value(edit: Mapping[str, Any]) -> tuple[Any, str]:
    """Return the value of an edit and, if it cannot be read, the text itself and a fault."""
    if "yaml" not in edit and "value" not in edit:
        return _DROPPED, ""
    value = edit.get("value")
    try:
        if "yaml" in edit:
            value = str(edit["yaml"])
            found = OmegaConf.to_container(OmegaConf.load(io.StringIO(f"value: {value}\n")), resolve=False)
            return found["value"] if isinstance(found, dict) and list(found) == ["value"] else value, ""
        OmegaConf.create({"value": value})
    except (yaml.YAMLError, OmegaConfBaseException) as error:
        text = str(value)
        return text.replace("${", "\\${"), f"{text[:200]!r} cannot be read: {' '.join(str(error).split())[:200]}"
    return value, ""


def _put(node: Any, path: Sequence[str | int], value: Any, where: str) -> Any:
    """Return a copy of part of a configuration with a value set or removed below it."""
    if not path:
        return value
    key, *rest = path
    if isinstance(key, int):
        items = list(node) if isinstance(node, list | tuple) else [] if node is None else [node]
        items += [None] * (key + 1 - len(items))
        items[key] = _put(items[key], rest, value, where)
        return [item for item in items if item is not _DROPPED]
    if isinstance(node, str):  # the short form of a component, or of the model
        node = {"path": node} if where == "model" else {"use": node}
    below = f"{where}.{key}".lstrip(".")
    found = dict(node) if isinstance(node, Mapping) else {}
    now = _put(found.get(key), rest, value, below)
    if now is _DROPPED:
        found.pop(key, None)
    else:
        found[key] = now
    return found


def _shortened(value: Any, where: str) -> Any:
    """Shorten a component without options to its name, a list of one to its item, and a model to its path."""
    if isinstance(value, Mapping):
        below = {key: _shortened(each, f"{where}.{key}".lstrip(".")) for key, each in value.items()}
        if list(below) == ["use"] and isinstance(below["use"], str):
            return below["use"]
        return below["path"] if where == "model" and list(below) == ["path"] else below
    if isinstance(value, list):
        items = [_shortened(each, "") for each in value]
        return items[0] if where in _LISTS and len(items) == 1 and isinstance(items[0], str | Mapping) else items
    return value


def pruned(tree: Tree, form: Mapping[str, Any], kept: Sequence[str] = ()) -> Tree:
    """Return a configuration without values that equal their defaults.

    Args:
        tree: The configuration, with short forms expanded.
        form: The form, which knows the defaults.
        kept: Paths to keep, since the algorithm sets other defaults for them.
    """
    components = form["components"]

    def fields(known: Sequence[Mapping[str, Any]], value: Any, where: str, own: Mapping[str, Any]) -> Any:
        if not isinstance(value, Mapping):
            return value
        by_name = {field["name"]: {**field, **({"default": own[field["name"]]} if field["name"] in own else {})}
                   for field in known}  # fmt: skip
        found = {}
        for key, each in value.items():
            path, field = f"{where}.{key}".lstrip("."), by_name.get(key)
            now = each if field is None else one(field, each, path)
            if field is None or path in kept or not _is_default(field, now):
                found[key] = now
        return found

    def one(field: Mapping[str, Any], value: Any, where: str) -> Any:
        if field["widget"] == "section":
            return fields(field["fields"], value, where, {})
        if field["widget"] == "component":
            return component(field["kind"], value, where, field["default"], ())
        if field["widget"] == "components" and isinstance(value, list):
            return [component(field["kind"], each, where, None, field.get("fields", ())) for each in value]
        return value

    def component(kind: str, value: Any, where: str, default: Any, extra: Sequence[Mapping[str, Any]]) -> Any:
        own = default if isinstance(default, Mapping) else {}
        if isinstance(value, str):
            value = {"use": value}
        if not isinstance(value, Mapping):
            return value
        name = value.get("use", own.get("use"))
        described = components.get(kind, {}).get(name) if isinstance(name, str) else None
        if described is None:
            return value
        # An algorithm's options for a part apply as long as the part is the algorithm's own.
        mine = {key: each for key, each in own.items() if key != "use"} if name == own.get("use") else {}
        return fields([*extra, *described["fields"]], value, where, mine)

    return dict(fields(form["fields"], tree, "", {}))


def _is_default(field: Mapping[str, Any], value: Any) -> bool:
    """Return whether a value is redundant: the default, or an empty section that exists anyway."""
    default = field["default"]
    if field["widget"] == "section":
        return value == {} and not field["nullable"] and not field["required"]
    if field["required"]:
        return False
    if field["widget"] == "component" and isinstance(value, Mapping) and isinstance(default, Mapping):
        return dict(value) in ({}, {"use": default["use"]})
    return (type(value) is type(default) and value == default) or (
        _number(value) and _number(default) and value == default
    )


def _number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
