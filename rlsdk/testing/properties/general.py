"""Properties of components of all kinds: how they are found, pickled, documented and created; parts of algorithms."""

from __future__ import annotations

import ast
import inspect
import pickle
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import attrs

from rlsdk.components import Use, component_of
from rlsdk.config.plan import default_faults, merge_parts
from rlsdk.config.section import RULE_KEYS, SOURCE_KEYS
from rlsdk.errors import OptionError, PluginError
from rlsdk.kinds import KINDS, PART_LISTS, PARTS, Kind
from rlsdk.options import Computed, structure
from rlsdk.plugins import with_own_parts
from rlsdk.testing.findings import NotApplicable, Violated
from rlsdk.testing.subject import Subject, fault_of, holds

HEAVY = frozenset({"torch", "ray", "vllm", "deepspeed", "transformers"})
"""Packages that take seconds to import and gigabytes to install."""
LIGHT: tuple[Kind, ...] = (
    "reward",
    "filter",
    "buffer",
    "stop",
    "workflow",
    "environment",
    "tasks",
    "sampler",
    "tracker",
    "renderer",
    "tool_parser",
    "diagnosis",
)
"""Kinds that run without a model: in scoring processes, environment workers, or the command line."""
RESOLVED = ("parts-resolve",)


@holds(
    "picklable-by-reference",
    *KINDS,
    remedy="define it at the top level of its module, under the name in its def or class statement",
    makes=False,
)
def picklable(subject: Subject, _: Any) -> None:
    """It is pickled by name, and unpickled as the same object in every process."""
    obj = subject.component.obj
    where = f"{obj.__module__}.{obj.__qualname__}"
    try:
        found = pickle.loads(pickle.dumps(obj))  # noqa: S301 - our own bytes
    except Exception as error:  # pickle raises whatever the objects do
        raise Violated("form", f"{where}, found by its name", f"{type(error).__name__}: {error}") from error
    if found is not obj:
        raise Violated("form", f"{where}, found by its name", f"another object: {found!r}")


@holds(
    "options-documented",
    *KINDS,
    remedy="describe the result in the docstring's first line, and add a line `NAME: …` for each option under "
    "`Args:` (or under `Attributes:` of a class)",
    makes=False,
)
def documented(subject: Subject, _: Any) -> None:
    """The docstring describes it, and explains each option."""
    summary = subject.component.summary
    if not summary:
        raise Violated("form", "a docstring", "none")
    bare = [
        option.name for option in subject.component.options if not option.help and f"`{option.name}`" not in summary
    ]
    if bare:
        raise Violated("form", "a line for each option", f"none for {', '.join(bare)}")


@holds(
    "options-typed",
    *KINDS,
    remedy="annotate it, as in `limit: int = 3`: values of other types are then rejected before anything starts",
    makes=False,
)
def typed(subject: Subject, _: Any) -> None:
    """Each option has a type, against which values from a configuration are checked."""
    obj = subject.component.obj
    if inspect.isclass(obj) and attrs.has(obj):
        bare = [field.name for field in attrs.fields(obj) if field.init and field.type is None]
    else:
        function = obj.__init__ if inspect.isclass(obj) else obj
        keywords = inspect.signature(function).parameters.values()
        names = {option.name for option in subject.component.options}
        bare = [p.name for p in keywords if p.name in names and p.annotation is p.empty]
    if bare:
        raise Violated("form", "an annotation for each option", f"none for {', '.join(bare)}")


@holds(
    "light-import",
    *LIGHT,
    remedy="import it inside the function that needs it; a reward should also name it in its mark, "
    "imports=('torch',), so that scoring processes share one import",
    makes=False,
)
def light(subject: Subject, _: Any) -> None:
    """Its module imports no large package at the top, which would delay every scoring or environment process."""
    obj = subject.component.obj
    module = sys.modules.get(obj.__module__)
    file = inspect.getsourcefile(obj)
    if file is None or not Path(file).is_file():
        raise NotApplicable("its source is not in a file")
    components = (component_of(each) for each in vars(module).values()) if module else ()
    if any(each is not None and each.kind not in LIGHT for each in components):
        return  # other components there compute with tensors, so torch is imported anyway
    tree = ast.parse(Path(file).read_bytes())
    found = sorted({name for name in _imported(tree.body) if name in HEAVY} - set(subject.component.imports))
    if found:
        raise Violated("form", "a fast import", f"import {', '.join(found)} at the top of {file}")


def _imported(body: list[ast.stmt]) -> Iterator[str]:
    """Yield the top-level packages that a module's statements import when it is imported."""
    for node in body:
        if isinstance(node, ast.Import):
            yield from (alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.module.partition(".")[0]
        elif isinstance(node, ast.If) and "TYPE_CHECKING" not in ast.unparse(node.test):
            yield from _imported([*node.body, *node.orelse])
        elif isinstance(node, ast.Try):
            yield from _imported(node.body)


@holds(
    "defaults-valid",
    *KINDS,
    remedy="give each option a default of its annotated type, such that the component accepts all defaults together",
    makes=False,
)
def defaults_valid(subject: Subject, _: Any) -> None:
    """Each default has its option's type, and the component can be created with its defaults."""
    for option in subject.component.options:
        if option.required or isinstance(option.default, Computed) or attrs.has(type(option.default)):
            continue  # a value object: its class checked it when it was created
        _, faults = structure(option.default, option.type)
        if faults:
            text = "; ".join(f"{option.name}{path}: {sentence}" for path, sentence in faults)
            raise Violated("form", f"{option.name}: {option.type_name}", text)
    if subject.missing:
        return
    try:
        subject.make()
    except OptionError as error:
        raise Violated("form", "something ready to run", str(error)) from error
    except Exception as error:
        raise Violated("form", "something ready to run", f"{type(error).__name__}: {error}") from error


@holds(
    "contract",
    *KINDS,
    remedy="define what is expected; `rlsdk new KIND NAME.py` writes a working example of each kind",
    makes=False,
)
def contract(subject: Subject, _: Any) -> None:
    """The component has the parameters or methods with which its kind is called."""
    fault = fault_of(subject.component)
    if fault:
        raise Violated("form", *fault)
    keys = {"reward": RULE_KEYS, "tasks": SOURCE_KEYS}.get(subject.component.kind, frozenset()) | {"use"}
    if taken := [option.name for option in subject.component.options if option.name in keys]:
        beside = f"which a configuration reads as its own keys beside the options: {', '.join(sorted(keys))}"
        raise Violated("form", f"options with other names than those {beside}", ", ".join(taken))


@holds(
    "parts-resolve",
    "algorithm",
    remedy="write each part as Use('NAME', {option: value}); `rlsdk plugins KIND` lists names and options",
)
def parts_resolve(subject: Subject, _: Any) -> None:
    """Every component it names exists and accepts the given options."""
    algorithm = with_own_parts(subject.plugins, subject.plugin, subject.make())
    found = [(part, kind, getattr(algorithm, part)) for part, kind in {**PARTS, **PART_LISTS}.items()]
    parts: list[tuple[str, Any, Any]] = [each for each in found if not isinstance(each[2], tuple)]
    lists = [
        (f"{part}[{i}]", kind, use)
        for part, kind, uses in found
        if isinstance(uses, tuple)
        for i, use in enumerate(uses)
    ]
    for part, kind, use in [*parts, *lists]:
        if use is None:
            continue
        try:
            subject.plugins.resolve(subject.plugins.reference(kind, use.name, use.options))
        except (OptionError, PluginError) as error:
            raise Violated("form", f"{part}: a component that can be created", f"{_written(use)}: {error}") from error


@holds(
    "parts-merge",
    "algorithm",
    remedy="use plain attrs fields: a converter or __attrs_post_init__ would see the merged values",
    after=RESOLVED,
)
def parts_merge(subject: Subject, _: Any) -> None:
    """One option of a part can be set without changing the part's other options or the other parts."""
    defaults: Any = with_own_parts(subject.plugins, subject.plugin, subject.make())
    for part, kind in PARTS.items():
        use = getattr(defaults, part)
        if not isinstance(use, Use) or not isinstance(use.name, str):
            continue
        _, component = subject.plugins.find(kind, use.name)
        plain = {o.name: o.default for o in component.options if isinstance(o.default, bool | int | float | str)}
        free = next((name for name in plain if name not in use.options), None)
        if free is None:
            continue
        option = {free: plain[free]}
        merged = Use(use.name, {**use.options, **option})
        given = {**subject.options, **merge_parts(defaults, {part: dict(option)})}
        try:
            found = with_own_parts(subject.plugins, subject.plugin, subject.component.bind(given))
        except OptionError as error:
            raise Violated("form", f"{part}: {option} to be taken", str(error)) from error
        for field in attrs.fields(type(defaults)):
            here = merged if field.name == part else getattr(defaults, field.name)
            got = getattr(found, field.name)
            if here != got:
                raise Violated("value", f"{field.name}: {_written(here)}, with {part}: {option} set", _written(got))


@holds(
    "defaults-fit",
    "algorithm",
    remedy="write paths as in a configuration, {'rollout.dynamic_sampling': True}",
)
def defaults_fit(subject: Subject, _: Any) -> None:
    """Its defaults for other sections of a run are existing settings with valid values."""
    algorithm: Any = subject.make()
    for path, text in default_faults(algorithm.defaults):
        raise Violated("form", f"defaults[{path!r}]: a key of a run, with a valid value", text)


def _written(value: Any) -> str:
    return f"{value.name}{dict(value.options) or ''}" if isinstance(value, Use) else repr(value)
