"""Relative paths in a configuration: relative to the working folder or, if missing there, to the configuration."""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rlsdk.storage.location import is_url

log = logging.getLogger(__name__)
WRITTEN = frozenset({"name", "out", "mirror"})
"""Top-level keys that name outputs of a run: always relative to the working folder."""
KEYS = frozenset({"path", "file", "tokenizer", "reference", "critic"})
"""Keys whose text is a path even without a slash or suffix."""
_FUNCTION = re.compile(r"(?P<file>.+\.py):(?P<name>[A-Za-z_][\w.-]*)")
_SUFFIX = re.compile(r".+\.[A-Za-z][A-Za-z0-9]{0,7}")


def resolve_paths(tree: Mapping[str, Any], source: Path) -> dict[str, Any]:
    """Resolve relative paths that exist next to a configuration, but not in the working folder.

    If a path exists in both places, the one in the working folder is used, and a warning names the other.

    Args:
        tree: The configuration, with short forms expanded.
        source: Its file.
    """
    folder = source.parent
    if folder.resolve() == Path.cwd():
        return dict(tree)
    return {key: value if key in WRITTEN else _found(value, key, key, folder) for key, value in tree.items()}


def _found(value: Any, path: str, key: str, folder: Path) -> Any:
    if isinstance(value, Mapping):
        return {k: _found(below, f"{path}.{k}", str(k), folder) for k, below in value.items()}
    if isinstance(value, list):
        return [_found(below, f"{path}[{i}]", key, folder) for i, below in enumerate(value)]
    return _located(value, path, key, folder) if isinstance(value, str) else value


def _located(text: str, path: str, key: str, folder: Path) -> str:
    match = _FUNCTION.fullmatch(text)
    file, function = (match["file"], f":{match['name']}") if match else (text, "")
    named = key in KEYS or "/" in file or _SUFFIX.fullmatch(file) is not None
    if not named or len(file) > 1024 or "\n" in file or file.startswith("~") or os.path.isabs(file) or is_url(file):
        return text
    here, adjacent = Path(file), folder / file
    if not _exists(adjacent):
        return text
    if not _exists(here):
        return f"{adjacent}{function}"
    if not here.samefile(adjacent):
        log.warning(
            "%s: %s exists in the working folder, which is used, and next to the configuration: %s",
            path,
            file,
            adjacent,
        )
    return text


def _exists(path: Path) -> bool:
    try:
        return path.exists()
    except (OSError, ValueError):  # too long for a file system, or with a null byte: not a path
        return False
