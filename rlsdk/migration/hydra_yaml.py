"""Read YAML as Hydra does."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import yaml

from rlsdk.errors import ConfigError

MOST = 20_000
"""Maximum values in a configuration: nested anchors could make a file hold any number."""


class _Loader(yaml.SafeLoader):
    """YAML loader that reads 1e-6 as a number, as Hydra does."""


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"[-+]?(\d[\d_]*)(\.[\d_]*)?[eE][-+]?\d+"), list("-+0123456789")
)


def parse_yaml(content: str, name: str) -> dict[str, Any]:
    """Parse a file.

    Raises:
        ConfigError: It is not YAML, too large, or no mapping.
    """
    try:
        found = yaml.load(content, _Loader)
        size = _size(found)
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        reason = (
            "its values are too deeply nested" if isinstance(error, RecursionError) else " ".join(str(error).split())
        )
        raise ConfigError([f"{name} is not valid YAML: {reason}"]) from error
    if size > MOST:
        raise ConfigError([f"{name} holds more than {MOST:,} values, which no configuration does"])
    if not isinstance(found, dict):
        held = "is empty" if found is None else f"holds a value of type {type(found).__name__}"
        raise ConfigError([f"{name} {held}; expected a mapping at the top level"])
    return {str(key): value for key, value in found.items()}


def _size(value: Any, seen: int = 0, depth: int = 0) -> int:
    """Count values, those of anchors each time they are used; counting ends above the limit."""
    if depth > 100:
        raise RecursionError
    if isinstance(value, Mapping | list):
        for below in value.values() if isinstance(value, Mapping) else value:
            seen = _size(below, seen, depth + 1)
            if seen > MOST:
                break
        return seen
    return seen + 1


def parse_value(written: str) -> Any:
    """Parse a value as Hydra does: as YAML if possible."""
    written = written.strip()
    if "${" in written and not written.startswith(("[", "{")):
        return written
    try:
        found = yaml.load(written, _Loader)
    except (yaml.YAMLError, ValueError, RecursionError):
        return written
    if isinstance(found, dict) and all(value is None for value in found.values()) and found:
        return written  # a placeholder such as {token}
    return found if isinstance(found, bool | int | float | list | dict) or found is None else written
