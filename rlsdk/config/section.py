"""Base of the sections of a configuration: a script may write names, marked objects or paths in place of values."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Self, TypeAlias, cast

from rlsdk.components import Use
from rlsdk.options import structure

Named: TypeAlias = str | Use | Mapping[str, Any] | Callable[..., Any]
"""A component: its name, a `Use`, a mapping with `use`, a marked object, or what `rlsdk.load` returned."""


class Section:
    """Base of sections: remembers which of its values were given, so that an algorithm may set the others."""

    __slots__ = ("_given",)
    _given: frozenset[str]

    def __new__(cls, *_: Any, **values: Any) -> Self:
        """Create a section; attrs fills it."""
        made = super().__new__(cls)
        object.__setattr__(made, "_given", frozenset(values))
        return made


def given(section: Section) -> frozenset[str]:
    """Return the names of the values that a section was created with."""
    return section._given


def used(value: Named) -> Use:
    """Return the choice of a component; what is none is kept, and reported with its path by `check`."""
    found, faults = structure(value, Use)
    return cast("Use", value if faults else found)


def used_or_none(value: Named | None) -> Use | None:
    """Return the choice of a component that may be left out."""
    return None if value is None else used(value)


def all_used(value: Named | Sequence[Named]) -> tuple[Use, ...]:
    """Return the choices of components of a list, or of one alone."""
    return tuple(used(each) for each in listed(value))


def listed(value: Any) -> Sequence[Any]:
    """Return a list or tuple as it is, and anything else as the only item of one; nothing for None."""
    if value is None:
        return ()
    return value if isinstance(value, list | tuple) else (value,)
