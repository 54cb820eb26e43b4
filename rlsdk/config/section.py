"""Base of configuration sections: a script may pass names, marked objects or paths in place of values."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Self, TypeAlias, cast

from rlsdk.components import Use
from rlsdk.options import structure

Named: TypeAlias = str | Use | Mapping[str, Any] | Callable[..., Any]
"""A component: its name, a `Use`, a mapping with `use`, a marked object, or a result of `rlsdk.load`."""


class Section:
    """Base of sections: records which values were given, so that an algorithm may set the others."""

    __slots__ = ("_given",)
    _given: frozenset[str]

    def __new__(cls, *_: Any, **values: Any) -> Self:
        """Create a section; attrs sets its values."""
        made = super().__new__(cls)
        object.__setattr__(made, "_given", frozenset(values))
        return made


def given(section: Section) -> frozenset[str]:
    """Return the names of the values that were passed to a section."""
    return section._given


def used(value: Named) -> Use:
    """Convert a value to a `Use`; an invalid one is kept, and `check` reports it with its path."""
    found, faults = structure(value, Use)
    return cast("Use", value if faults else found)


def used_or_none(value: Named | None) -> Use | None:
    """Convert a value to a `Use`, or None."""
    return None if value is None else used(value)


def all_used(value: Named | Sequence[Named]) -> tuple[Use, ...]:
    """Convert a list of values, or a single one, to `Use`s."""
    return tuple(used(each) for each in listed(value))


def listed(value: Any) -> Sequence[Any]:
    """Return a list or tuple unchanged, any other value as a tuple of one, and None as an empty tuple."""
    if value is None:
        return ()
    return value if isinstance(value, list | tuple) else (value,)
