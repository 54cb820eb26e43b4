"""The origin of each value of a run: a line of its file, an override, the algorithm, or a default."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, get_args

import attrs
import yaml

from rlsdk.components import Use
from rlsdk.config.plan import Plan
from rlsdk.config.reference import of_component, settings
from rlsdk.config.rules import value_at
from rlsdk.config.schema import COMPONENT_KEYS, LISTS
from rlsdk.config.tree import RENAMED, apply_override, leaves
from rlsdk.contracts import ApartRole
from rlsdk.kinds import COMBINED, PART_LISTS, PARTS
from rlsdk.options import options_of
from rlsdk.plugins import ComponentRef, short_name

_ABSENT = object()
"""Value of a key below a section that is null."""


@attrs.frozen
class Origin:
    """A value of a run.

    Attributes:
        path: Dotted path of its key.
        value: The value; a component is its name.
        origin: File and line, override, algorithm or default.
    """

    path: str
    value: Any
    origin: str


def origins(source: str | Path | Mapping[str, Any], overrides: Sequence[str], plan: Plan) -> list[Origin]:
    """Return every value of a checked run with its origin, including component options."""
    written = _Written(source, overrides)
    found: list[Origin] = []
    components = dict(_components(plan))
    for setting in settings():
        owner = setting.path.rpartition(".")[0]
        if setting.path in COMPONENT_KEYS or setting.path in LISTS:
            below = {p: r for p, r in components.items() if p == setting.path or p.startswith(f"{setting.path}[")}
            if setting.path == "algorithm":
                found += _algorithm(plan, written)
            for path, reference in below.items():
                found += _component(path, reference, written, plan)
            if not below and setting.path != "algorithm":
                found.append(Origin(setting.path, None, written.origin(setting.path) or "default"))
        elif owner not in LISTS:  # keys next to a component in a list are below it
            value = value_at(plan.config, setting.path, _ABSENT)
            if value is not _ABSENT and (setting.section is None or value is None):
                origin = written.origin(setting.path) or _defaulted(plan, setting.path)
                found.append(Origin(setting.path, value, origin))
    return [*found, *_extra_keys(plan, written)]


def _defaulted(plan: Plan, path: str) -> str:
    return f"algorithm {_name(plan.config.algorithm.name)}" if path in plan.defaulted else "default"


def _name(name: Any) -> str:
    return short_name(name) if isinstance(name, str) else getattr(name, "__name__", str(name))


def _components(plan: Plan) -> Iterator[tuple[str, ComponentRef]]:
    """Yield the components outside the algorithm, by path; a list's only component has the path of the list."""
    for path in COMPONENT_KEYS:
        role, _, name = path.rpartition(".")
        apart: Mapping[str, ComponentRef] = {str(name): found for name, found in plan.apart.items()}
        reference = apart.get(role) if role in get_args(ApartRole) else getattr(plan, name)
        if isinstance(reference, ComponentRef):  # not the algorithm itself, but its parts
            yield path, reference
    for path, several in {
        "tasks.train": [source.reference for source in plan.tasks_train],
        "tasks.eval": [source.reference for source in plan.tasks_eval],
        "reward": [part.reference for part in plan.rewards],
        "trackers": list(plan.trackers),
        "diagnoses": list(plan.diagnoses),
    }.items():
        for i, reference in enumerate(several):
            yield (path if len(several) == 1 else f"{path}[{i}]"), reference


def _component(path: str, reference: ComponentRef, written: _Written, plan: Plan) -> Iterator[Origin]:
    """Yield a component and its options."""
    component, name = plan.plugins.component(reference), short_name(reference.name)
    yield Origin(path, name, written.origin(f"{path}.use") or written.origin(path) or _defaulted(plan, path))
    for option in of_component(component, path):
        key = option.path.removeprefix(f"{path}.")
        value = reference.options.get(key, option.default)
        origin = written.origin(option.path)
        if origin is None and key in component.lengths and key in reference.options:
            origin = "sampling.max_tokens"
        yield Origin(option.path, value, origin or f"default of {name}")


def _algorithm(plan: Plan, written: _Written) -> Iterator[Origin]:
    """Yield the algorithm, its fields, and its parts with their options."""
    use = plan.config.algorithm
    name = _name(use.name)
    yield Origin("algorithm", name, written.origin("algorithm.use") or written.origin("algorithm") or "default")
    for field in options_of(type(plan.algorithm)):
        path, value = f"algorithm.{field.name}", getattr(plan.algorithm, field.name)
        if field.name in PARTS and isinstance(value, Use):
            yield from _part(plan, path, value, field.name, written)
        elif field.name in PART_LISTS or (field.name in COMBINED and value):
            kind = {**PARTS, **PART_LISTS}[field.name]
            for i, each in enumerate(value):
                yield from _part(plan, path if len(value) == 1 else f"{path}[{i}]", each, kind, written)
            if not value:
                yield Origin(path, [], written.origin(path) or f"algorithm {name}")
        elif field.name != "defaults":  # shown where they are
            value = plan.loss.entropy_coef if field.name == "entropy_coef" else plan.schedules.get(field.name, value)
            given = (written.origin(f"{path}{below}") for below in ("", ".to", ".target"))  # or a schedule or a target
            yield Origin(path, value, next(filter(None, given), f"algorithm {name}"))


def _part(plan: Plan, path: str, use: Use, kind: Any, written: _Written) -> Iterator[Origin]:
    """Yield a part of the algorithm with its options; those set by the algorithm have it as their origin."""
    reference = plan.plugins.reference(kind, use.name, {})
    component, name = plan.plugins.component(reference), short_name(reference.name)
    origin = written.origin(f"{path}.use") or written.origin(path)
    yield Origin(path, name, origin or f"algorithm {_name(plan.config.algorithm.name)}")
    for option in of_component(component, path):
        key = option.path.removeprefix(f"{path}.")
        algorithm = f"algorithm {_name(plan.config.algorithm.name)}" if key in use.options and not origin else None
        value = use.options.get(key, option.default)
        yield Origin(option.path, value, written.origin(option.path) or algorithm or f"default of {name}")


def _extra_keys(plan: Plan, written: _Written) -> Iterator[Origin]:
    """Yield the keys next to the components of a list, such as the weight of a reward."""
    several: dict[str, Sequence[Any]] = {
        "tasks.train": plan.config.tasks.train,
        "tasks.eval": plan.config.tasks.eval,
        "reward": [part.rule for part in plan.rewards],
    }
    for setting in settings():
        path, _, key = setting.path.rpartition(".")
        values = several.get(path, ())
        for i, value in enumerate(values):
            where = setting.path if len(values) == 1 else f"{path}[{i}].{key}"
            yield Origin(where, getattr(value, key), written.origin(where) or "default")


class _Written:
    """Values given in a configuration file and overrides, by path."""

    def __init__(self, source: str | Path | Mapping[str, Any], overrides: Sequence[str]) -> None:
        """Read both; they have already been checked."""
        if isinstance(source, Mapping):
            self._found = {_current(path): "argument" for path, _ in leaves(dict(source))}
        else:
            node = yaml.compose(Path(source).read_text(encoding="utf-8"), Loader=yaml.SafeLoader)
            self._found = {_current(path): f"{source}:{line}" for path, line in _lines(node, "")}
        for text in overrides:
            key = _current(text.partition("=")[0].strip().lstrip("+"))
            below = {path for path in self._found if path == key or path.startswith((f"{key}.", f"{key}["))}
            self._found = {path: origin for path, origin in self._found.items() if path not in below}
            tree: dict[str, Any] = {}
            apply_override(tree, f"value={text.partition('=')[2]}")
            for path, _ in leaves(tree.get("value"), key):
                self._found[path] = f"override {text}"

    def origin(self, path: str) -> str | None:
        """Return where a path is given; None if it is not. A single component counts as a list of one."""
        for listed in (*LISTS, *(f"algorithm.{part}" for part in (*PART_LISTS, *COMBINED))):
            if path == listed or path.startswith(f"{listed}."):
                first = path.replace(listed, f"{listed}[0]", 1)
                return self._found.get(path) or self._found.get(first)
        return self._found.get(path) or (self._found.get("model") if path == "model.path" else None)


def _current(path: str) -> str:
    section, dot, rest = path.partition(".")
    return RENAMED.get(section, section) + dot + rest


def _lines(node: yaml.Node | None, path: str) -> Iterator[tuple[str, int]]:
    """Yield path and line of each leaf of a YAML file; keys merged by `<<` come first: a mapping's own keys win."""
    if isinstance(node, yaml.MappingNode):
        merged = [value for key, value in node.value if key.tag == "tag:yaml.org,2002:merge"]
        for value in merged:
            for each in value.value if isinstance(value, yaml.SequenceNode) else [value]:
                yield from _lines(each, path)
        for key, value in node.value:
            if key.tag != "tag:yaml.org,2002:merge":
                yield from _lines(value, f"{path}.{key.value}" if path else str(key.value))
    elif isinstance(node, yaml.SequenceNode):
        for i, value in enumerate(node.value):
            yield from _lines(value, f"{path}[{i}]")
        if not node.value:
            yield path, node.start_mark.line + 1
    elif node is not None:
        yield path, node.start_mark.line + 1
