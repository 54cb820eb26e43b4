"""Rows of the tables that convert keys of other trainers, and readers of their values."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping
from functools import cache
from typing import Any, Literal

import attrs

Status = Literal["mapped", "changed", "missing", "ignored"]
"""mapped: same meaning; changed: the note says how it differs; missing: no counterpart, the note says what to do;
ignored: nothing to do, the note says why."""


NOTES = "notes"
"""Key under which a table's `finish` returns notes for the user."""


class UnfitError(ValueError):
    """A value that cannot be converted; the message says why, and what to do."""


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
        finish: Makes settings from many keys together, such as tasks and rewards; applied last.
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
    finish: Callable[[Given], Mapping[str, Any]] = lambda _: {}
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


def same(key: str, to: str, read: Callable[[Any], Any], sample: Any, give: Give | None = None) -> KeyRule:
    """Return the rule of a key whose counterpart means the same."""
    return KeyRule(key, "mapped", tuple(to.split()), "", sample, read, give)


def changed(key: str, to: str, read: Callable[[Any], Any], sample: Any, note: str, give: Give | None = None) -> KeyRule:
    """Return the rule of a key whose counterpart differs in meaning; the note says how."""
    return KeyRule(key, "changed", tuple(to.split()), note, sample, read, give)


def part(key: str, to: str, read: Callable[[Any], Any], sample: Any, note: str = "") -> KeyRule:
    """Return the rule of a key that another key's rule, or the table's `finish`, reads."""

    def give(value: Any, _: Given) -> Mapping[str, Any]:
        return {}

    return KeyRule(key, "changed" if note else "mapped", tuple(to.split()), note, sample, read, give)


def missing(key: str, note: str, sample: Any = 1) -> KeyRule:
    """Return the rule of a key without a counterpart; the note says what to do."""
    return KeyRule(key, "missing", (), note, sample)


def ignored(key: str, note: str, sample: Any = 1) -> KeyRule:
    """Return the rule of a key that needs no counterpart; the note says why."""
    return KeyRule(key, "ignored", (), note, sample)


def unless(key: str, harmless: tuple[Any, ...], note: str, sample: Any) -> KeyRule:
    """Return the rule of a key without a counterpart, which does not matter if its value is harmless."""

    def give(value: Any, _: Given) -> KeyOutcome:
        if value in harmless or str(value).lower() in [str(each).lower() for each in harmless]:
            return KeyOutcome.ignored("off, as always in rlsdk")
        return KeyOutcome.missing(note)

    return KeyRule(key, "missing", (), note, sample, give=give)


def only_with(switch: str, key: str, note: str, sample: Any = 1) -> KeyRule:
    """Return the rule of a key without a counterpart, which does not matter if a flag of the other trainer is off."""

    def give(value: Any, given: Given) -> KeyOutcome:
        on = given.read(switch, flag, False)
        return KeyOutcome.missing(note) if on else KeyOutcome.ignored(f"{switch} is off")

    return KeyRule(key, "missing", (), note, sample, give=give)


def unset(value: Any) -> str:
    """Return a hint if a value refers to an environment variable that is not set; else empty."""
    names = re.findall(r"\$\{oc\.env:(\w+)", value) if isinstance(value, str) else []
    if not names:
        return ""
    return f"; set {' and '.join(names)} in the environment of this command, or write the value"


def number(value: Any) -> float:
    """Read a number, which may be text."""
    if isinstance(value, str):
        try:
            value = float(value.replace("_", "").strip())
        except ValueError:
            raise UnfitError(f"expected a number, got {value!r}{unset(value)}") from None
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise UnfitError(f"expected a finite number, got {value!r}")
    return float(value)


def whole(value: Any) -> int:
    """Read a whole number, which may be text or a float such as 1e8."""
    if isinstance(value, str) and unset(value):
        raise UnfitError(f"expected a whole number, got {value!r}{unset(value)}")
    found = number(value)
    if found != int(found):
        raise UnfitError(f"expected a whole number, got {value!r}")
    return int(found)


def count(value: Any) -> int:
    """Read a whole number of at least one."""
    if (found := whole(value)) < 1:
        raise UnfitError(f"expected a whole number above 0, got {value!r}; rlsdk's default is taken")
    return found


def interval(value: Any) -> int:
    """Read a number of steps between two events; values below 1 mean never, which is 0 in rlsdk."""
    return max(whole(value), 0)


def flag(value: Any) -> bool:
    """Read a truth value, which may be text."""
    known = {"true": True, "yes": True, "1": True, "on": True, "false": False, "no": False, "0": False, "off": False}
    found = known.get(str(value).strip().lower())
    if found is None:
        raise UnfitError(f"expected true or false, got {value!r}{unset(value)}")
    return found


def text(value: Any) -> str:
    """Read a text."""
    if not isinstance(value, str | int | float) or isinstance(value, bool) or value == "":
        raise UnfitError(f"expected text, got {value!r}")
    return str(value)


def texts(value: Any) -> list[str]:
    """Read a text, a list of them, or a list in the form `[a,b]` that shells pass."""
    if isinstance(value, str):
        inner = value.strip()
        inner = inner[1:-1].strip() if len(inner) > 1 and inner[0] == inner[-1] and inner[0] in "'\"" else inner
        parts = inner[1:-1].split(",") if inner[:1] == "[" and inner[-1:] == "]" else [inner]
        value = [part.strip().strip("'\"") for part in parts]
    if not isinstance(value, list | tuple) or not all(isinstance(each, str | int | float) for each in value):
        raise UnfitError(f"expected text, or a list of texts, got {value!r}")
    return [str(each) for each in value if each != ""]


def numbers(value: Any) -> list[float]:
    """Read a list of numbers."""
    return [number(each) for each in texts(value)]


def two(value: Any) -> list[float]:
    """Read two numbers, such as the ends of a range."""
    if len(found := numbers(value)) != 2:
        raise UnfitError(f"expected two numbers, got {value!r}")
    return found


@attrs.frozen
class Choice:
    """A reader that looks up a name, ignoring case.

    Attributes:
        known: Name -> value in rlsdk.
        what: Kind of thing that is named, for messages.
    """

    known: Mapping[str, Any]
    what: str

    def __call__(self, value: Any) -> Any:
        """Look up a name."""
        name = str(value).strip().lower()
        for each, found in self.known.items():
            if each.lower() == name:
                return found
        known = ", ".join(self.known)
        raise UnfitError(f"{self.what} {value!r} has no counterpart in rlsdk; known are {known}{unset(value)}")


def choice(names: Iterable[str], what: str) -> Choice:
    """Return a reader of names that are the same in rlsdk."""
    return Choice({name: name for name in names}, what)
