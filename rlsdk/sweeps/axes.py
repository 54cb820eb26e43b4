"""Parse a sweep's command-line settings: one value, a list of values, or a range."""

from __future__ import annotations

import itertools
import math
import re
from collections import Counter
from collections.abc import Iterator, Sequence

import attrs

from rlsdk.errors import ConfigError

POINTS = 3
"""Default number of points of a range."""
OWN = ("name", "out")
"""Settings that the sweep sets for each run."""
_RANGE = re.compile(r"(log|lin):([^:]+):([^:]+)(?::([^:]+))?")
_OPENING = {"[": "]", "{": "}", "(": ")"}


@attrs.frozen
class Axis:
    """A setting with several values.

    Attributes:
        key: Path of the setting.
        values: Values, as in an override.
    """

    key: str
    values: tuple[str, ...]


def axes_of(settings: Sequence[str]) -> tuple[list[Axis], list[str]]:
    """Split settings into those with several values and those with one.

    Args:
        settings: `key=value`, `key=a,b,c`, `key=log:LOW:HIGH[:POINTS]` or `key=lin:LOW:HIGH[:POINTS]`. Commas within
            brackets or quotes belong to a value.

    Raises:
        ConfigError: Lists all faults.
    """
    axes, fixed, faults = [], [], []
    for setting in settings:
        key, _, text = setting.partition("=")
        try:
            values = _values(text)
        except ValueError as error:
            faults.append(f"{key}: {error}")
            continue
        if len(values) < 2:
            fixed.append(setting)
        elif key in OWN:
            faults.append(f"{key}: each run of a sweep gets its own; give one value, which names the sweep")
        else:
            axes.append(Axis(key, values))
    twice = [key for key, count in Counter(axis.key for axis in axes).items() if count > 1]
    faults += [f"{key}: several values are given more than once; write them as one list, {key}=a,b,c" for key in twice]
    if faults:
        raise ConfigError(faults)
    return axes, fixed


def combinations(axes: Sequence[Axis]) -> Iterator[dict[str, str]]:
    """Yield all combinations of values: key -> value."""
    for values in itertools.product(*(axis.values for axis in axes)):
        yield {axis.key: value for axis, value in zip(axes, values, strict=True)}


def _values(text: str) -> tuple[str, ...]:
    if text.startswith(("log:", "lin:")):
        return _range(text)
    values = _parted(text)
    if len(values) > 1:
        if "" in values:
            raise ValueError(f"{text!r} has an empty value between its commas")
        for one, other in itertools.combinations(values, 2):
            if _read(one) == _read(other):
                raise ValueError(
                    f"{text!r} has a duplicate value ({one} and {other}); use --seeds for several runs of one setting"
                )
    return values


def _read(value: str) -> float | str:
    """Return a value for comparison: as numbers, 0.001 and 1e-3 are equal."""
    try:
        return float(value)
    except ValueError:
        return value


def _parted(text: str) -> tuple[str, ...]:
    """Split at commas outside brackets and quotes."""
    parts, closing, quote = [""], [], ""
    for character in text:
        if quote:
            quote = "" if character == quote else quote
        elif character in "\"'":
            quote = character
        elif character in _OPENING:
            closing.append(_OPENING[character])
        elif closing and character == closing[-1]:
            closing.pop()
        elif character == "," and not closing:
            parts.append("")
            continue
        parts[-1] += character
    return tuple(part.strip() for part in parts)


def _range(text: str) -> tuple[str, ...]:
    found = _RANGE.fullmatch(text)
    form = f"expected {text[:3]}:LOW:HIGH or {text[:3]}:LOW:HIGH:POINTS, as in {text[:3]}:1e-6:1e-3:4; got {text!r}"
    if found is None:
        raise ValueError(form)
    try:
        low, high, points = float(found[2]), float(found[3]), int(found[4] or POINTS)
    except ValueError:
        raise ValueError(form) from None
    if points < 2 or not -math.inf < low < high < math.inf or (found[1] == "log" and low <= 0):
        above = ", above 0" if found[1] == "log" else ""
        raise ValueError(f"a range needs LOW below HIGH{above}, both finite, and at least 2 points; got {text!r}")
    shares = [i / (points - 1) for i in range(points)]
    if found[1] == "log":
        numbers = [low ** (1 - share) * high**share for share in shares]
    else:
        numbers = [low + share * (high - low) for share in shares]
    values = tuple(map(_number, numbers))
    if len(set(values)) < points:
        raise ValueError(f"the points of {text!r} are equal in six digits; list them, as in {low!r},{high!r}")
    return values


def _number(value: float) -> str:
    """Return a number in six digits, and all digits of a whole one, which may be a count of steps or tokens."""
    whole = round(value)
    return str(whole) if math.isclose(value, whole, rel_tol=1e-9) else f"{value:.6g}"
