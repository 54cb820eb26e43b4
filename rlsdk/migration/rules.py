"""Rules by which the keys of another trainer are converted, and what a trainer's package consists of."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any, Literal

import attrs

from rlsdk.migration.values import UnfitError, whole

Status = Literal["mapped", "changed", "missing", "ignored"]
"""mapped: same meaning; changed: the note says how it differs; missing: no counterpart, the note says what to do;
ignored: nothing to do, the note says why."""
NOTES = "notes"
"""Key under which a function of `Framework.finish` returns notes for the user."""


@attrs.frozen
class KeyOutcome:
    """Result of a conversion, if its status or note differs from that of its row.

    Attributes:
        values: Path in an rlsdk config -> value; a path that ends with `[]` is appended to.
        note: Note in place of the row's.
        status: Status in place of the row's; by default, a note says how the meaning has changed.
    """

    values: Mapping[str, Any]
    note: str = ""
    status: Status = attrs.field()

    @status.default
    def _by_note(self) -> Status:
        return "changed" if self.note else "mapped"

    @classmethod
    def ignored(cls, note: str) -> KeyOutcome:
        """Return the outcome for a value that needs no counterpart; the note says why."""
        return cls({}, note, "ignored")

    @classmethod
    def missing(cls, note: str) -> KeyOutcome:
        """Return the outcome for a value without a counterpart; the note says what to do."""
        return cls({}, note, "missing")


@attrs.frozen(eq=False)
class Given:
    """Values of another trainer's configuration by dotted path, with its defaults.

    Attributes:
        flat: Path -> value, as given.
        tree: The same, nested.
        defaults: Defaults of the other trainer.
        written: Current name of a key -> the older name in the configuration.
        key: Key that is being converted.
    """

    flat: Mapping[str, Any]
    tree: Mapping[str, Any]
    defaults: Mapping[str, Any]
    written: Mapping[str, str] = {}
    key: str = ""

    def get(self, key: str, fallback: Any = None) -> Any:
        """Return the value of a key, or the other trainer's default; null counts as not given."""
        value = self.flat.get(key)
        value = self.defaults.get(key) if value is None else value
        return fallback if value is None else value

    def read(self, key: str, reader: Callable[[Any], Any], fallback: Any = None) -> Any:
        """Return the value of a key, or else the other trainer's default, converted by a reader; else the fallback."""
        for value in (self.flat.get(key), self.defaults.get(key)):
            try:
                if value is not None:
                    return reader(value)
            except UnfitError:  # the row of that key reports it
                pass
        return fallback

    def section(self, path: str) -> Mapping[str, Any]:
        """Return the mapping under a dotted path; empty if there is none."""
        node: Any = self.tree
        for part in path.split("."):
            node = node.get(part) if isinstance(node, Mapping) else None
        return node if isinstance(node, Mapping) else {}

    def whole(self, key: str, fallback: int = 1) -> int:
        """Return the value of a key as a whole number."""
        return int(self.read(key, whole, fallback))


Give = Callable[[Any, Given], Mapping[str, Any] | KeyOutcome]


@attrs.frozen
class KeyRule:
    """Rule by which a key of the other trainer is converted.

    Attributes:
        key: Dotted path in the other trainer's configuration; `*` matches one part of it, `**` all that follow.
        status: Usual status of the key.
        to: Paths in an rlsdk config that it sets or helps to set.
        note: How the meaning changes, what to do instead, or why nothing is needed.
        sample: Typical value, which tests convert.
        read: Reader of the value.
        give: Converts the value to settings; None sets `to` to the value.
    """

    key: str
    status: Status
    to: tuple[str, ...] = ()
    note: str = ""
    sample: Any = None
    read: Callable[[Any], Any] = lambda value: value
    give: Give | None = None

    def settings(self, value: Any, given: Given) -> KeyOutcome:
        """Convert a value.

        Raises:
            UnfitError: The value has no counterpart.
        """
        if self.status in ("missing", "ignored") and self.give is None:
            return KeyOutcome({}, self.note, self.status)
        found = self.read(value)
        made = dict.fromkeys(self.to, found) if self.give is None else self.give(found, given)
        return made if isinstance(made, KeyOutcome) else KeyOutcome(made, self.note, self.status)


@attrs.frozen(kw_only=True)
class Framework:
    """The configuration of another trainer.

    Attributes:
        name: Name for `rlsdk migrate`.
        title: Name of the trainer.
        rows: Rules for its keys.
        defaults: Its defaults, if rlsdk's differ or other values are computed from them.
        finish: Functions that make settings from many keys together, such as tasks and rewards, and may add `NOTES`;
            applied last, each over those before it.
        variants: Part of a command, or class of a Python file -> defaults of the variant of the trainer that it starts.
        others: Part of a command that starts training in a way that is not converted -> the setting that replaces it.
        renamed: Older names of keys -> the name in `rows`; those that end with a dot are sections.
        files: Key that names a further file -> section that holds the contents of this file.
        entries: Parts of command lines that start its training.
        constructors: Names of classes and functions in Python files whose arguments are its keys -> names of their
            positional arguments.
        whole: Keys whose values stay whole, such as lists of functions, some of which are made by calls.
    """

    name: str
    title: str
    rows: tuple[KeyRule, ...]
    defaults: Mapping[str, Any] = {}
    finish: tuple[Callable[[Given], Mapping[str, Any]], ...] = ()
    variants: Mapping[str, Mapping[str, Any]] = {}
    others: Mapping[str, str] = {}
    renamed: Mapping[str, str] = {}
    files: Mapping[str, str] = {}
    entries: tuple[str, ...] = ()
    constructors: Mapping[str, tuple[str, ...]] = {}
    whole: tuple[str, ...] = ()

    def row(self, key: str) -> KeyRule | None:
        """Return the rule of a key, by name or by pattern; None if there is none."""
        exact = next((row for row in self.rows if row.key == key), None)
        return exact or next((row for row in self.rows if "*" in row.key and _pattern(row.key).fullmatch(key)), None)

    def current(self, key: str) -> str:
        """Return the name in `rows` of a key that may have an older one."""
        section = next((old for old in self.renamed if old.endswith(".") and key.startswith(old)), "")
        return self.renamed.get(key) or (self.renamed[section] + key.removeprefix(section) if section else key)


@cache
def _pattern(key: str) -> re.Pattern[str]:
    parts = [".+" if each == "**" else re.escape(each).replace(r"\*", "[^.]+") for each in key.split(".")]
    return re.compile(r"\.".join(parts))
