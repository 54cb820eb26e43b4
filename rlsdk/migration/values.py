"""Readers of the values of other trainers' keys."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from typing import Any

import attrs


class UnfitError(ValueError):
    """A value that cannot be converted; the message says why, and what to do."""


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


def listed(value: Any) -> list[str]:
    """Read a list of texts, or one text with commas."""
    given = texts(value)
    return [each.strip(" '\"") for text in given for each in text.split(",") if each.strip(" '\"")]


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
