"""Sections of a configuration, and components in lists with additional keys next to `use`.

A script may pass names, marked objects or paths in place of values.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Self, TypeAlias, cast

import attrs

from rlsdk.components import Use
from rlsdk.contracts import RewardSpec
from rlsdk.options import CONVERTER, Mismatches, structure, unknown

Named: TypeAlias = str | Use | Mapping[str, Any] | Callable[..., Any]
"""A component: its name, a `Use`, a mapping with `use`, a marked object, or a result of `rlsdk.load`."""


class Section:
    """Base of sections: records which values were given, so that an algorithm may set the others."""

    __slots__ = ("_given",)
    _given: frozenset[str]

    def __new__(cls, *_: Any, **values: Any) -> Self:
        """Create a section; attrs sets its values.

        Raises:
            TypeError: A keyword is not a key of this section.
        """
        keys = attrs.fields_dict(cast("type[attrs.AttrsInstance]", cls))
        if wrong := [name for name in values if name not in keys]:
            raise TypeError(f"{cls.__name__}: {'; '.join(unknown('key', name, keys) for name in wrong)}")
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


@attrs.frozen
class SourceUse:
    """One source of tasks.

    Attributes:
        use: The component.
        source: Name in metrics, checkpoints and `sources` of rewards; defaults to the component's name, and its tasks
            then keep their own source.
        weight: Share of each batch, relative to the other sources; ignored in evaluations, which use all sources in
            full.
    """

    use: Use
    source: str = ""
    weight: float = 1.0


SourceLike: TypeAlias = Named | SourceUse


def source_uses(value: SourceLike | Sequence[SourceLike] | None) -> tuple[SourceUse, ...]:
    """Convert a list, or a single value, to task sources; invalid ones are kept, and `check` reports them."""
    found = ((each, structure(each, SourceUse)) for each in listed(value))
    return tuple(cast("SourceUse", each if faults else use) for each, (use, faults) in found)


@attrs.frozen
class RewardUse:
    """One part of the reward.

    Attributes:
        use: The reward component.
        rule: How it is combined with the other parts: `weight`, `gate`, `multiply`, `range` and `sources`;
            and its name, `metric`.
    """

    use: Use
    rule: RewardSpec = RewardSpec()


RewardLike: TypeAlias = Named | RewardUse


def reward_uses(value: RewardLike | Sequence[RewardLike] | None) -> tuple[RewardUse, ...]:
    """Convert a list, or a single value, to rewards; invalid ones are kept, and `check` reports them."""
    found = ((each, structure(each, RewardUse)) for each in listed(value))
    return tuple(cast("RewardUse", each if faults else use) for each, (use, faults) in found)


def _parted(value: Any, keys: Iterable[str]) -> tuple[dict[str, Any], Any]:
    """Split a value into the entries of `keys`, and the component with its options."""
    if not isinstance(value, Mapping):
        return {}, value
    extra = {k: v for k, v in value.items() if k in keys}
    return extra, {k: v for k, v in value.items() if k not in keys}


RULE_KEYS = frozenset(field.name for field in attrs.fields(RewardSpec)) - {"name"}
"""Keys allowed next to the options of a reward."""


def _structure_reward(value: Any, _: Any) -> RewardUse:
    if isinstance(value, RewardUse):
        return value
    given, component = _parted(value, RULE_KEYS)
    if isinstance(given.get("sources"), str):
        given["sources"] = [given["sources"]]
    rule, faults = structure(given, RewardSpec)
    if rule is None:
        raise Mismatches(faults)
    return RewardUse(CONVERTER.structure(component, Use), rule)


@attrs.frozen
class _Share:
    source: str = ""
    weight: float = 1.0


SOURCE_KEYS = frozenset(field.name for field in attrs.fields(_Share))
"""Keys allowed next to the options of a task source."""


def _structure_source(value: Any, _: Any) -> SourceUse:
    if isinstance(value, SourceUse):
        return value
    given, component = _parted(value, SOURCE_KEYS)
    share, faults = structure(given, _Share)
    if share is None:
        raise Mismatches(faults)
    return SourceUse(CONVERTER.structure(component, Use), share.source, share.weight)


CONVERTER.register_structure_hook(SourceUse, _structure_source)
CONVERTER.register_structure_hook(RewardUse, _structure_reward)
