"""Writes a typed configuration as the mapping that a file would hold."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import attrs

from rlsdk.components import Use
from rlsdk.config.section import Section, given
from rlsdk.config.uses import RewardUse, SourceUse


def as_tree(value: Any) -> Any:
    """Convert a section, a component or a list of them to plain values; marked objects stay.

    Of a section, values are written that were given or differ from their default: the others are left for an algorithm
    to set, as they are where a file does not mention them.
    """
    if isinstance(value, Use):
        return {"use": value.name, **value.options} if value.options else value.name
    if isinstance(value, RewardUse):
        return _beside(value.use, value.rule)
    if isinstance(value, SourceUse):
        return _beside(value.use, value)
    if attrs.has(type(value)):
        return {field.name: as_tree(getattr(value, field.name)) for field in _written(value)}
    if isinstance(value, Mapping):
        return {key: as_tree(below) for key, below in value.items()}
    return [as_tree(each) for each in value] if isinstance(value, list | tuple) else value


def _written(section: Any) -> list[Any]:
    fields = attrs.fields(type(section))
    names = given(section) if isinstance(section, Section) else frozenset()
    if len(names) == len(fields):  # a copy (`attrs.evolve`) passes every value, whatever was given
        names = frozenset()
    return [field for field in fields if field.name in names or getattr(section, field.name) != field.default]


def _beside(use: Use, rule: Any) -> Any:
    """Write a component with the keys that stand beside its options."""
    keys = {
        field.name: as_tree(getattr(rule, field.name))
        for field in attrs.fields(type(rule))
        if field.name not in ("use", "name") and getattr(rule, field.name) != field.default
    }
    return {"use": use.name, **use.options, **keys} if keys else as_tree(use)
