"""Rows of the tables that convert keys of other trainers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import attrs

from rlsdk.migration.rules import Give, Given, KeyOutcome, KeyRule
from rlsdk.migration.values import flag

Rules = Iterable["KeyRule | Rules"]
"""Rules of keys, in any nesting."""


def table(*rules: KeyRule | Rules) -> tuple[KeyRule, ...]:
    """Return the rules of a trainer in their order: of several patterns that match a key, the first one applies."""
    found: list[KeyRule] = []
    for each in rules:
        found += [each] if isinstance(each, KeyRule) else table(*each)
    return tuple(found)


def under(section: str, *rules: KeyRule | Rules) -> tuple[KeyRule, ...]:
    """Return the rules of the keys of a section."""
    return tuple(attrs.evolve(rule, key=f"{section}.{rule.key}") for rule in table(*rules))


def _rules(keys: str, *rule: Any) -> tuple[KeyRule, ...]:
    return tuple(KeyRule(key, *rule) for key in keys.split())


def same(keys: str, to: str, read: Callable[[Any], Any], sample: Any, give: Give | None = None) -> tuple[KeyRule, ...]:
    """Return the rules of keys whose counterpart means the same.

    Args:
        keys: One key, or several with spaces between them.
        to: Paths in an rlsdk config, with spaces between them.
        read: Reader of the value.
        sample: Typical value, which tests convert.
        give: Converts the value to settings; None sets `to` to the value.
    """
    return _rules(keys, "mapped", tuple(to.split()), "", sample, read, give)


def changed(
    keys: str, to: str, read: Callable[[Any], Any], sample: Any, note: str, give: Give | None = None
) -> tuple[KeyRule, ...]:
    """Return the rules of keys whose counterpart differs in meaning; the note says how."""
    return _rules(keys, "changed", tuple(to.split()), note, sample, read, give)


def part(keys: str, to: str, read: Callable[[Any], Any], sample: Any, note: str = "") -> tuple[KeyRule, ...]:
    """Return the rules of keys that another key's rule, or the table's `finish`, reads."""
    return _rules(keys, "changed" if note else "mapped", tuple(to.split()), note, sample, read, lambda value, given: {})


def missing(keys: str, note: str) -> tuple[KeyRule, ...]:
    """Return the rules of keys without a counterpart; the note says what to do."""
    return _rules(keys, "missing", (), note, 1)


def ignored(keys: str, note: str) -> tuple[KeyRule, ...]:
    """Return the rules of keys that need no counterpart; the note says why."""
    return _rules(keys, "ignored", (), note, 1)


def unless(keys: str, harmless: tuple[Any, ...], note: str, sample: Any) -> tuple[KeyRule, ...]:
    """Return the rules of keys without a counterpart, which do not matter if their value is harmless."""

    def give(value: Any, _: Given) -> KeyOutcome:
        if value in harmless or str(value).lower() in [str(each).lower() for each in harmless]:
            return KeyOutcome.ignored("off, as always in rlsdk")
        return KeyOutcome.missing(note)

    return _rules(keys, "missing", (), note, sample, lambda value: value, give)


def only_with(switch: str, keys: str, note: str, sample: Any = 1) -> tuple[KeyRule, ...]:
    """Return the rules of keys without a counterpart, which do not matter if a flag of the other trainer is off."""

    def give(value: Any, given: Given) -> KeyOutcome:
        on = given.read(switch, flag, False)
        return KeyOutcome.missing(note) if on else KeyOutcome.ignored(f"{switch} is off")

    return _rules(keys, "missing", (), note, sample, lambda value: value, give)


def switched(values: Mapping[str, Any], note: str = "") -> Give:
    """Return a converter for a flag that sets these values; if it is off, it sets nothing."""

    def give(value: Any, _: Given) -> KeyOutcome:
        if flag(value):
            return KeyOutcome(values, note)
        return KeyOutcome.ignored("off")

    return give
