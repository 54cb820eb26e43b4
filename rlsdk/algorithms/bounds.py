"""Check of options that are the two ends of a range."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from rlsdk.contracts import RunFacts


def in_order(low: str, high: str) -> Callable[[RunFacts, Mapping[str, Any]], Iterator[tuple[str, str]]]:
    """Return a check that refuses empty ranges.

    Args:
        low: Name of the option for the lower end.
        high: Name of the option for the upper end.
    """

    def check(run: RunFacts, options: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
        if options[low] > options[high]:
            yield low, f"{options[low]:g} is above {high}={options[high]:g}: no number is within these bounds"

    return check
