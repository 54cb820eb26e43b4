"""Renamed keys of a configuration: old names are still accepted, with a warning."""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping, Sequence
from typing import Any

from rlsdk.deprecation import Deprecation
from rlsdk.errors import ConfigError

log = logging.getLogger(__name__)
RENAMED = {"production": "rollout"}
"""Old name of a section -> current name."""
_OLD = "|".join(RENAMED)


def current(tree: Mapping[str, Any]) -> dict[str, Any]:
    """Replace old section names by current ones, including in interpolations.

    Raises:
        ConfigError: A section is given under both names.
    """
    both = [(old, new) for old, new in RENAMED.items() if old in tree and new in tree]
    if both:
        raise ConfigError(
            [f"{old}: this section is now called {new}, which is given as well; merge them" for old, new in both]
        )
    return {_noted(key): _interpolations(value) for key, value in tree.items()}


def current_path(path: str) -> str:
    """Replace an old name at the start of a setting's path: `production.stop` -> `rollout.stop`."""
    section, dot, rest = path.partition(".")
    return _noted(section) + dot + rest


def current_overrides(overrides: Sequence[str]) -> list[str]:
    """Replace old names in the keys of `key=value` texts."""
    return [re.sub(rf"^(\s*\+*)({_OLD})(?=[.=])", lambda m: m[1] + _noted(m[2]), text) for text in overrides]


def _noted(section: str) -> str:
    if section in RENAMED:
        log.warning("the section %s", Deprecation(old=section, new=RENAMED[section], since="0.1", until="1.0"))
    return RENAMED.get(section, section)


def _interpolations(value: Any) -> Any:
    if isinstance(value, str):
        return re.sub(rf"\$\{{({_OLD})(?=[.}}])", lambda m: "${" + RENAMED[m[1]], value)
    if isinstance(value, dict):
        return {key: _interpolations(below) for key, below in value.items()}
    return [_interpolations(below) for below in value] if isinstance(value, list) else value
