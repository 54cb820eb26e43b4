"""Values of gymnasium's spaces as text, and back."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import numpy as np

from rlsdk.errors import ValueFault

_NUMBER = re.compile(r"[+-]?(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d{1,3})?", re.ASCII)
_LONGEST = 10_000
"""Characters of an action; more are not read."""
_DIGITS = 40


def written(value: Any, precision: int) -> str:
    """Format an observation as text: numbers with few decimals, mappings with a line per key.

    Args:
        value: Observation from any space.
        precision: Number of decimals.
    """
    if isinstance(value, Mapping):
        return "\n".join(f"{key}: {written(each, precision)}" for key, each in value.items())
    if isinstance(value, tuple):
        return ", ".join(written(each, precision) for each in value)
    if isinstance(value, str):
        return value
    array = np.asarray(value)
    if array.dtype.kind == "f":
        array = np.round(array.astype(np.float64), precision) + 0.0  # no -0.0
    return str(array.tolist())


def described(space: Any) -> str:
    """Describe the actions of a space in words.

    Args:
        space: The action space.

    Raises:
        ValueFault: Actions of this kind of space cannot be read from text.
    """
    kind = _kind(space)
    if kind == "Discrete":
        return f"a whole number from {int(space.start)} to {int(space.start + space.n - 1)}"
    if kind == "Text":
        return f"a text of {space.min_length} to {space.max_length} characters"
    count = int(np.prod(space.shape))
    if kind == "Box":
        low, high = (written(np.ravel(side)[0], 4) for side in (space.low, space.high))
        same = len(set(np.ravel(space.low))) == len(set(np.ravel(space.high))) == 1
        return f"{_numbers(count, 'number')}" + (f" from {low} to {high}" if same else "")
    if kind == "MultiBinary":
        return f"{_numbers(count, 'number')}, each 0 or 1"
    least = np.ravel(space.start)
    ranges = ", ".join(f"{low} to {low + n - 1}" for low, n in zip(least, np.ravel(space.nvec), strict=True))
    return f"{_numbers(count, 'whole number')}, from {ranges}"


def parsed(space: Any, text: str) -> tuple[bool, Any]:
    """Parse a text into (valid, action) for an action space.

    Args:
        space: Discrete, Box, MultiDiscrete, MultiBinary or Text.
        text: Text to parse.
    """
    if len(text) > _LONGEST:
        return False, None
    if _kind(space) == "Text":
        return action_of(space, text)
    tokens = re.split(r"[,\s]+", text.strip().strip("[]()").strip())
    if not all(len(token) <= _DIGITS and _NUMBER.fullmatch(token) for token in tokens):
        return False, None
    values = [float(token) for token in tokens]
    if _kind(space) == "Discrete":
        return action_of(space, values[0]) if len(values) == 1 else (False, None)
    return action_of(space, values)


def action_of(space: Any, value: Any) -> tuple[bool, Any]:
    """Convert a plain value (as in YAML) into (valid, action), with the action in the space's own type.

    Args:
        space: Any space.
        value: A number, a list of numbers, or a value the space accepts as is.
    """
    kind = type(space).__name__
    if kind == "Discrete":
        whole = isinstance(value, int | float) and not isinstance(value, bool) and float(value).is_integer()
        return (whole and bool(space.contains(int(value))), int(value) if whole else None)
    if kind not in ("Box", "MultiDiscrete", "MultiBinary"):
        return bool(space.contains(value)), value
    try:
        given = np.asarray(value, dtype=np.float64)
    except (TypeError, ValueError):
        return False, None
    if given.size != np.prod(space.shape) or not np.isfinite(given).all():
        return False, None
    given = given.reshape(space.shape)
    if np.issubdtype(space.dtype, np.integer) and not _whole(space.dtype, given):
        return False, None
    with np.errstate(over="ignore"):
        action = given.astype(space.dtype)
    return bool(np.isfinite(action).all() and space.contains(action)), action


def _whole(dtype: Any, given: np.ndarray) -> bool:
    """Return True if all values are integers representable in an integer dtype."""
    limits = np.iinfo(dtype)
    return bool((given == np.round(given)).all() and (limits.min <= given).all() and (given <= limits.max).all())


def _kind(space: Any) -> str:
    kind = type(space).__name__
    if kind not in ("Discrete", "Box", "MultiDiscrete", "MultiBinary", "Text"):
        raise ValueFault(
            f"actions of the space {space} cannot be read from text; name them: actions: {{NAME: ACTION, …}}"
        )
    return kind


def _numbers(count: int, what: str) -> str:
    return f"a {what}" if count == 1 else f"{count} {what}s apart by commas"
