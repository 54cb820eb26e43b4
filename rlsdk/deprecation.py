"""Deprecated names: they work until a stated version, and warn with their replacement."""

from __future__ import annotations

import importlib
import warnings
from typing import Any

import attrs


@attrs.frozen(kw_only=True)
class Deprecation:
    """A deprecated name that still works."""

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
        """Warn about a use of the old name; pytest shows the warning with its location."""
        warnings.warn(str(self), DeprecationWarning, stacklevel=stacklevel + 1)


NAMES: dict[str, Deprecation] = {}
"""Deprecated public name with its module, such as `rlsdk.kit.NAME`, -> its replacement."""


def replacement(module: str, name: str, stacklevel: int = 2) -> Any:
    """Return the object for a module's deprecated name, with a warning.

    Raises:
        AttributeError: The name was never public there, or has been removed.
    """
    found = NAMES.get(f"{module}.{name}")
    if found is None:
        raise AttributeError(f"module {module!r} has no attribute {name!r}")
    found.warn(stacklevel + 1)
    home, _, now = found.new.rpartition(".")
    return getattr(importlib.import_module(home), now)
