"""Names that were given up: they work until a stated version, and say what replaces them."""

from __future__ import annotations

import importlib
import warnings
from typing import Any

import attrs


@attrs.frozen(kw_only=True)
class Deprecation:
    """A name that still works.

    Attributes:
        old: Name that was given up.
        new: Replacement.
        since: Version in which the replacement came.
        until: Version that no longer knows the old name.
    """

    old: str
    new: str
    since: str
    until: str

    def __str__(self) -> str:
        return (
            f"{self.old} is now called {self.new} (since rlsdk {self.since}); "
            f"the old name works until rlsdk {self.until}: please rename it"
        )

    def warn(self, stacklevel: int = 2) -> None:
        """Warn whoever uses the old name; pytest shows the warning with the place of use."""
        warnings.warn(str(self), DeprecationWarning, stacklevel=stacklevel + 1)


NAMES: dict[str, Deprecation] = {}
"""Address of a public name that was given up, such as `rlsdk.kit.NAME`, and what replaces it."""


def replacement(module: str, name: str, stacklevel: int = 2) -> Any:
    """Return what a module's old name stands for, with a warning.

    Raises:
        AttributeError: The name was never public there, or its time is over.
    """
    found = NAMES.get(f"{module}.{name}")
    if found is None:
        raise AttributeError(f"module {module!r} has no attribute {name!r}")
    found.warn(stacklevel + 1)
    home, _, now = found.new.rpartition(".")
    return getattr(importlib.import_module(home), now)
