"""Merge a YAML file (or a mapping) and `key=value` overrides into one plain tree, with interpolations resolved.

Renamed sections are accepted under their old names, with a warning.
"""

from __future__ import annotations

import itertools
import logging
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from enum import Enum
from pathlib import Path
from typing import Any, TypeAlias

import attrs
import yaml
from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from rlsdk.components import Use, component_of
from rlsdk.config import defaults
from rlsdk.config.schema import COMPONENT_KEYS, LISTS, Config
from rlsdk.config.section import RewardUse, Section, SourceUse, given
from rlsdk.config.yaml_errors import yaml_fault
from rlsdk.deprecation import Deprecation
from rlsdk.errors import ConfigError, first_line
from rlsdk.kinds import COMBINED, KINDS, PART_LISTS, PARTS
from rlsdk.options import CONTINUATION, did_you_mean

log = logging.getLogger(__name__)
Tree = dict[str, Any]
Source: TypeAlias = str | Path | Mapping[str, Any] | Config
"""A configuration: a YAML file, a mapping with names or marked objects as components, or the typed `rlsdk.Config`."""
_LISTS = (*(f"algorithm.{part}" for part in (*PART_LISTS, *COMBINED)), *LISTS)
_NAMES = [*COMPONENT_KEYS, *(f"algorithm.{part}" for part in PARTS), *_LISTS]
_SHORTHAND = re.compile("|".join([*map(re.escape, _NAMES), *(rf"{re.escape(name)}\.\d+" for name in _LISTS)]))
"""Pattern of the paths where a name is short for `{use: NAME}`."""
RENAMED = {"production": "rollout"}
"""Old name of a section -> current name."""
_OLD = "|".join(RENAMED)


def read(source: Source, overrides: Sequence[str] = ()) -> tuple[Tree, list[str]]:
    """Read a configuration.

    Args:
        source: A YAML file, a mapping, or a typed configuration.
        overrides: `key=value` texts; the value is YAML.

    Returns:
        The tree, and all faults of overrides and interpolations; the keys at fault are not in the tree.

    Raises:
        ConfigError: The file is missing or is not YAML.
    """
    loaded, objects = _load(source)
    tree = current(loaded)
    objects = {(RENAMED.get(str(path[0]), path[0]), *path[1:]): value for path, value in objects.items()}
    if wrong := [each for each in overrides if not isinstance(each, str)]:  # in a program
        expected = "overrides: expected texts such as 'steps=20', one argument each"
        raise ConfigError([f"{expected}, got {each!r:.100}, a {type(each).__name__}" for each in wrong])
    named = current_overrides(overrides)
    faults = _replaced(named)
    for override in named:
        fault = apply_override(tree, override)
        faults += [fault] if fault else []
    resolved, unresolved = _interpolate(tree)
    _put_back(resolved, objects)
    for key in ("out", "mirror", "plugins"):  # a folder called "~" would be created in the working folder
        if key in resolved:
            resolved[key] = _with_home(resolved[key])
    return resolved, faults + unresolved


def _with_home(value: Any) -> Any:
    """Expand `~` at the beginning of a path or of several."""
    if isinstance(value, list):
        return [_with_home(each) for each in value]
    return os.path.expanduser(value) if isinstance(value, str) else value


def plain(value: Any) -> Any:
    """Convert a configuration to plain values; marked objects become text."""
    if isinstance(value, Mapping):
        # Numbers stay numbers, as in a file; options of environments have some as keys.
        return {k if isinstance(k, str | int | float) else str(k): plain(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [plain(v) for v in value]
    return value if isinstance(value, str | int | float | bool | None) else repr(value)


def leaves(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield path and value of each leaf of a configuration; an empty mapping or list is a leaf."""
    if isinstance(value, Mapping) and value:
        for key, below in value.items():
            yield from leaves(below, f"{path}.{key}" if path else str(key))
    elif isinstance(value, list) and value:
        for i, below in enumerate(value):
            yield from leaves(below, f"{path}[{i}]")
    else:
        yield path, value


def _load(source: Source) -> tuple[Tree, dict[tuple[str | int, ...], Any]]:
    if isinstance(source, Mapping | Config):
        objects: dict[tuple[str | int, ...], Any] = {}
        return _take_objects(source, (), objects), objects
    path = Path(source)
    try:
        loaded = OmegaConf.load(path)
    except FileNotFoundError:
        hint = did_you_mean(path, [each.name for each in path.parent.glob("*.y*ml")])
        raise ConfigError([f"{path}: there is no such file (working folder: {Path.cwd().name}/){hint}"]) from None
    except IsADirectoryError:
        raise ConfigError([f"{path} is a folder; pass the YAML file in it"]) from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError([f"{path} cannot be read: {error}"]) from error
    except yaml.YAMLError as error:
        text = path.read_text(encoding="utf-8", errors="replace")
        raise ConfigError([f"{path} is not valid YAML: {yaml_fault(error, text)}"]) from error
    except OmegaConfBaseException as error:
        raise ConfigError([f"{error.full_key or path}: {first_line(error)}{_DOLLAR}"]) from error
    tree = OmegaConf.to_container(loaded, resolve=False)
    if not isinstance(tree, dict):
        raise ConfigError(
            [f"{path} contains a value of type {type(tree).__name__}; expected keys with values at the top level"]
        )
    return {str(k): v for k, v in tree.items()}, {}


def _take_objects(value: Any, path: tuple[str | int, ...], objects: dict[tuple[str | int, ...], Any]) -> Any:
    """Replace marked objects, which are allowed in place of names, by text: omegaconf accepts only plain values."""
    if isinstance(value, Use | RewardUse | SourceUse | Section):
        value = as_tree(value)
    if isinstance(value, Mapping):
        # Integer keys stay integers, as in a file; options of environments have some.
        keyed = {k if isinstance(k, str | int) else str(k): v for k, v in value.items()}
        return {k: _take_objects(v, (*path, k), objects) for k, v in keyed.items()}
    if isinstance(value, list | tuple):
        return [_take_objects(v, (*path, i), objects) for i, v in enumerate(value)]
    if component_of(value) is not None:
        objects[path] = value
        return f"<{value!r}>"
    if hasattr(value, "tolist"):  # a number or an array of numpy or torch
        return value.tolist()
    if not isinstance(value, str | int | float | bytes | Enum | Path | None):
        where = "".join(f"[{key}]" if isinstance(key, int) else f".{key}" for key in path).removeprefix(".")
        raise ConfigError([f"{where}: {_not_plain(value, path)}"])
    return str(value) if isinstance(value, Path) else value


def _not_plain(value: Any, path: tuple[str | int, ...]) -> str:
    """Return the fault of a value that a configuration cannot hold."""
    got = f"got {value!r:.100}"
    if not callable(value):
        return f"expected text, a number, a list, a mapping or a marked object; {got}, a {type(value).__name__}"
    key = [each for each in path if isinstance(each, str) and each != "use"][-1]
    kind = PART_LISTS.get(key, key)
    mark = kind if kind in KINDS else "KIND"
    return f"expected the name of a component or a marked object; {got}; write @rlsdk.{mark}('NAME') above it"


def _put_back(tree: Tree, objects: Mapping[tuple[str | int, ...], Any]) -> None:
    for path, obj in objects.items():
        node: Any = tree
        try:
            for key in path[:-1]:
                node = node[key]
            if node[path[-1]] == f"<{obj!r}>":  # unless an override replaced it
                node[path[-1]] = obj
        except (KeyError, IndexError, TypeError):  # an override replaced the surrounding value
            continue


def _replaced(overrides: Sequence[str]) -> list[str]:
    """Return a fault for each override of a value that a later one replaces together with all around it."""
    keys = [_path(text.partition("=")[0]) for text in overrides]
    return [
        f"override {overrides[i]!r}: has no effect, because {overrides[j]!r} comes after it and replaces all of "
        f"{'.'.join(keys[j])}; write it after that one"
        for i, j in itertools.combinations(range(len(keys)), 2)
        if len(keys[j]) < len(keys[i]) and keys[i][: len(keys[j])] == keys[j]
    ]


def _path(key: str) -> list[str]:
    return re.sub(r"\[(\d+)\]", r".\1", key.strip()).split(".")


def apply_override(tree: Tree, text: str) -> str | None:
    """Apply one `key=value` to the tree; return the fault, or None."""
    if re.search(r"[\ud800-\udfff]", text):  # how Python represents bytes that are not UTF-8
        return f"override {text!r}: expected text in UTF-8"
    if re.match(r"(~|\+{1,2})[\w.]+(=|$)", text):
        return f"override {text!r}: {_hydra_help(text)}"
    if "=" not in text or re.match(r"\s*[\w.\[\]]+\s*=", text) is None:
        return f"override {text!r}: expected key=value{_override_help(text)}"
    key, _, raw = text.partition("=")
    if raw.endswith("\\") or "\n" in raw:
        return f"override {text!r}: the value contains a line break or a backslash{CONTINUATION}"
    try:
        value = OmegaConf.to_container(OmegaConf.from_dotlist([f"v={raw}"]), resolve=False)["v"]
    except yaml.YAMLError as error:
        problem = getattr(error, "problem", None) or first_line(error)
        return f"override {text!r}: the value is not valid YAML ({problem}){_QUOTES}"
    except OmegaConfBaseException as error:
        return f"override {text!r}: {first_line(error)}{_DOLLAR}"
    return _assign(tree, _path(key), value, text)


_DOLLAR = "; an interpolation is written ${key} or ${oc.env:NAME}, plain text with a dollar sign \\${"
_QUOTES = "; a list or a mapping is written in single quotes as a whole: 'key=[a, b]'"


def _hydra_help(text: str) -> str:
    """Return what replaces Hydra's `+key=value`, `++key=value` and `~key`, which veRL users are used to."""
    key = text.lstrip("+~")
    if text.startswith("~"):
        return f"Hydra's ~ has no counterpart; set {key.partition('=')[0]} to a value (null, where it may be null)"
    return f"Hydra's + is not needed here; write {key if '=' in key else f'{key}=…'}"


def _override_help(text: str) -> str:
    if text.strip() in ("\\", "") or text.endswith("\\") or text.startswith(("\\", " ")):
        return CONTINUATION
    if text.isdigit():
        return f"; write a value as in steps={text}, and the step to resume from as --resume={text}"
    if text.startswith("--"):
        return f"; overrides have no dashes: {text.lstrip('-').replace(' ', '=')}=…"
    if text[:1] in "[]{}'\"," or text[-1:] in "[]{}'\",":
        return _QUOTES
    return ""


def _assign(tree: Tree, keys: list[str], value: Any, text: str) -> str | None:
    """Set a value in the tree, creating missing sections; return the fault, or None."""
    node: Any = tree
    for depth, key in enumerate(keys):
        where = ".".join(keys[:depth])
        if isinstance(node, list) and not (key.isdigit() and int(key) < len(node)):
            return f"override {text!r}: {where} is a list of {len(node)}; {key!r} is not an index of it"
        index: Any = int(key) if isinstance(node, list) else key
        if depth == len(keys) - 1:
            node[index] = value
            return None
        child = _spelt_out(".".join(keys[: depth + 1]), node[index] if isinstance(node, list) else node.get(key))
        if not isinstance(child, dict | list):
            path = ".".join(keys[: depth + 1])
            named = isinstance(child, str) and depth == len(keys) - 2 and depth > 0
            hint = f"; for a component, write {path}='{{use: {child}, {keys[-1]}: …}}'" if named else ""
            return f"override {text!r}: {path} is {child!r}, which has no keys{hint}"
        node[index] = child
        node = child
    return None


def _spelt_out(path: str, value: Any) -> Any:
    """Expand a value that keys are added to: the name of a component or model becomes a mapping."""
    if value is None:
        return {}
    if isinstance(value, str) and path == "model":
        return {"path": value}
    if isinstance(value, str) and _SHORTHAND.fullmatch(path):
        return {"use": value}
    return value


def _interpolate(tree: Tree) -> tuple[Tree, list[str]]:
    """Resolve `${…}` leaf by leaf, so that all unresolved ones are reported."""
    if _is_literal(tree):  # most are, and omegaconf takes milliseconds for each
        return tree, []
    try:
        config = OmegaConf.create(tree)
    except OmegaConfBaseException as error:  # in a mapping passed by a script; files and overrides are parsed earlier
        raise ConfigError([f"{error.full_key}: {first_line(error)}{_DOLLAR}"]) from error
    faults: list[str] = []

    def walk(node: DictConfig | ListConfig, path: str) -> Any:
        keys = range(len(node)) if isinstance(node, ListConfig) else list(node)
        out: dict[Any, Any] = {}
        for key in keys:
            where = f"{path}[{key}]" if isinstance(node, ListConfig) else f"{path}.{key}".lstrip(".")
            try:
                value = node[key]
            except (OmegaConfBaseException, ValueError) as error:
                raw = OmegaConf.to_container(node, resolve=False)[key]
                unset = re.search(r"Environment variable '(.+)' not found", str(error))
                why = f"the environment variable {unset[1]} is not set" if unset else first_line(error)
                name = re.search(r"Interpolation key '([A-Z][A-Z0-9_]*)' not found", why)
                name = name or re.search(r"\$\{env:(\w+)", raw)
                hint = f"; an environment variable is written ${{oc.env:{name[1]}}}" if name else ""
                faults.append(f"{where}: {raw!r} cannot be resolved: {why}{hint}")
                continue
            out[key] = walk(value, where) if isinstance(value, DictConfig | ListConfig) else value
        return list(out.values()) if isinstance(node, ListConfig) else out

    return walk(config, ""), faults


def _is_literal(value: Any) -> bool:
    """Return True if a tree has only values that omegaconf would return as they are: no `$`, `???` or special type."""
    if type(value) is dict:
        return all(type(key) in (str, int) and _is_literal(below) for key, below in value.items())
    if type(value) is list:
        return all(map(_is_literal, value))
    return type(value) in (int, float, bool, type(None)) or (type(value) is str and "$" not in value and value != "???")


def normalise(tree: dict[str, Any]) -> dict[str, Any]:
    """Expand short forms (see `with_lists`), and name the default component where only its options are given."""
    tree = with_lists(tree)
    for key in ("engine", "learner", "algorithm", "workflow"):
        tree = _with_use(tree, key, getattr(defaults, key.upper()))
    inner = (("model", "renderer"), ("critic", "learner"), ("reference", "learner"), ("eval", "workflow"))
    for section, key in inner:
        if isinstance(tree.get(section), Mapping):
            tree[section] = _with_use(tree[section], key, getattr(defaults, key.upper()))
    return tree


def with_lists(tree: Mapping[str, Any]) -> Tree:
    """Expand short forms: a model's path, a single task source, reward or tracker without a list."""
    tree = dict(tree)
    if isinstance(tree.get("tasks"), Mapping):
        tree["tasks"] = _with_lists(tree["tasks"], tree["tasks"])
    if isinstance(tree.get("model"), str):
        tree["model"] = {"path": tree["model"]}
    return _with_lists(tree, ("reward", "trackers", "diagnoses", "plugins"))


def spelled_out(tree: Mapping[str, Any]) -> Tree:
    """Expand all short forms, also names of components to `{use: NAME}`, so that paths can be compared."""
    return {key: _with_names(key, value) for key, value in normalise(dict(tree)).items()}


def _with_names(path: str, value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _with_names(f"{path}.{key}", below) for key, below in value.items()}
    if isinstance(value, list):
        return [_with_names(f"{path}.{i}", below) for i, below in enumerate(value)]
    return {"use": value} if isinstance(value, str) and _SHORTHAND.fullmatch(path) else value


def _with_use(tree: Mapping[str, Any], key: str, default: Use) -> dict[str, Any]:
    """Assign options without `use` to the default component."""
    alone = isinstance(tree.get(key), Mapping) and "use" not in tree[key]
    return {**tree, key: {"use": default.name, **tree[key]}} if alone else dict(tree)


def _with_lists(tree: Mapping[str, Any], keys: Iterable[str]) -> dict[str, Any]:
    """Wrap single values of the given keys in lists; drop null values."""
    out = dict(tree)
    for key in keys:
        if tree.get(key) is None:
            out.pop(key, None)
        elif not isinstance(tree[key], list | tuple):
            out[key] = [tree[key]]
    return out


def as_tree(value: Any) -> Any:
    """Convert a section, a component or a list of them to plain values, except marked objects.

    A section's values are included if they were given or differ from the default. The others are left for an algorithm
    to set, as if a file did not mention them.
    """
    if isinstance(value, Use):
        return {"use": value.name, **value.options} if value.options else value.name
    if isinstance(value, RewardUse):
        return _with_extra_keys(value.use, value.rule)
    if isinstance(value, SourceUse):
        return _with_extra_keys(value.use, value)
    if attrs.has(type(value)):
        return {field.name: as_tree(getattr(value, field.name)) for field in _written(value)}
    if isinstance(value, Mapping):
        return {key: as_tree(below) for key, below in value.items()}
    return [as_tree(each) for each in value] if isinstance(value, list | tuple) else value


def _written(section: Any) -> list[Any]:
    fields = attrs.fields(type(section))
    names = given(section) if isinstance(section, Section) else frozenset()
    if len(names) == len(fields):  # a copy (`attrs.evolve`) passes every value, given or not
        names = frozenset()
    return [field for field in fields if field.name in names or getattr(section, field.name) != field.default]


def _with_extra_keys(use: Use, rule: Any) -> Any:
    """Convert a component and the keys next to its options."""
    keys = {
        field.name: as_tree(getattr(rule, field.name))
        for field in attrs.fields(type(rule))
        if field.name not in ("use", "name") and getattr(rule, field.name) != field.default
    }
    return {"use": use.name, **use.options, **keys} if keys else as_tree(use)


def current(tree: Mapping[str, Any]) -> dict[str, Any]:
    """Replace old section names by current ones, including in interpolations.

    Raises:
        ConfigError: A section is given under both names.
    """
    both = [(old, new) for old, new in RENAMED.items() if old in tree and new in tree]
    if both:
        raise ConfigError(
            [f"{old}: this section is now called {new}, which is given as well; merge them" for old, new in both]
        )
    return {_noted(key): _interpolations(value) for key, value in tree.items()}


def current_path(path: str) -> str:
    """Replace an old name at the start of a setting's path: `production.stop` -> `rollout.stop`."""
    section, dot, rest = path.partition(".")
    return _noted(section) + dot + rest


def current_overrides(overrides: Sequence[str]) -> list[str]:
    """Replace old names in the keys of `key=value` texts."""
    return [re.sub(rf"^(\s*\+*)({_OLD})(?=[.=])", lambda m: m[1] + _noted(m[2]), text) for text in overrides]


def _noted(section: str) -> str:
    if section in RENAMED:
        log.warning("the section %s", Deprecation(old=section, new=RENAMED[section], since="0.1", until="1.0"))
    return RENAMED.get(section, section)


def _interpolations(value: Any) -> Any:
    if isinstance(value, str):
        return re.sub(rf"\$\{{({_OLD})(?=[.}}])", lambda m: "${" + RENAMED[m[1]], value)
    if isinstance(value, dict):
        return {key: _interpolations(below) for key, below in value.items()}
    return [_interpolations(below) for below in value] if isinstance(value, list) else value
