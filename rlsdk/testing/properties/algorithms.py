"""Properties of algorithms: their parts exist and can be overridden."""

from __future__ import annotations

from typing import Any

import attrs

from rlsdk.components import Use
from rlsdk.config.parts import default_faults, merge_parts
from rlsdk.errors import OptionError, PluginError
from rlsdk.kinds import PART_LISTS, PARTS
from rlsdk.plugins import with_own_parts
from rlsdk.testing.findings import Violated
from rlsdk.testing.properties.base import holds
from rlsdk.testing.subject import Subject

RESOLVED = ("parts-resolve",)


@holds(
    "parts-resolve",
    "algorithm",
    remedy="write each part as Use('NAME', {option: value}); `rlsdk plugins KIND` lists names and options",
)
def parts_resolve(subject: Subject, _: Any) -> None:
    """Every component it names exists and accepts the given options."""
    algorithm = with_own_parts(subject.plugins, subject.plugin, subject.make())
    parts: list[tuple[str, Any, Any]] = [(part, kind, getattr(algorithm, part)) for part, kind in PARTS.items()]
    lists = [
        (f"{part}[{i}]", kind, use)
        for part, kind in PART_LISTS.items()
        for i, use in enumerate(getattr(algorithm, part))
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
        if use is None or not isinstance(use.name, str):
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
