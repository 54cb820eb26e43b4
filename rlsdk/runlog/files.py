"""Read small pieces of a run folder's files: log tails, JSON lines, and JSON and YAML of limited size."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

MOST_BYTES = 2**18
"""Maximum number of bytes of a log per reply."""
_MOST_READ = 2**24
"""Maximum number of bytes of a file that is read whole."""


def read_json(path: Path) -> Any:
    """Return the content of a small JSON file; None if it is missing, being written or not JSON."""
    try:
        if path.stat().st_size > _MOST_READ:
            return None
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return None


def read_yaml(path: Path) -> dict[str, Any]:
    """Return the mapping in a small YAML file; empty if it is missing, being written or not a mapping."""
    import yaml

    try:
        if path.stat().st_size > _MOST_READ:
            return {}
        found = yaml.load(path.read_text(encoding="utf-8"), Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))
    except (OSError, ValueError, RecursionError, yaml.YAMLError):
        return {}
    return found if isinstance(found, dict) else {}


def json_lines(path: Path, most: int) -> list[dict[str, Any]]:
    """Return the last `most` objects of a JSON lines file, which may be missing; incomplete lines are skipped."""
    found = []
    for line in tail(path, MOST_BYTES)["text"].splitlines():
        try:
            value = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if isinstance(value, dict):
            found.append(value)
    return found[-most:]


def tail(path: Path, most: int = MOST_BYTES, after: int | None = None) -> dict[str, Any]:
    """Return text from the end of a file: `text`, `start` and `end` in bytes, and the file's `size`.

    Args:
        path: The file; a missing one is empty.
        most: Maximum number of bytes.
        after: Position up to which the reader has the file; only later text is returned.
    """
    try:
        size = path.stat().st_size
        start = max(size - most, 0)
        if after is not None and start < after <= size:
            start = after
        with path.open("rb") as file:
            file.seek(start)
            content = file.read(most)
    except OSError:
        return {"text": "", "start": 0, "end": 0, "size": 0}
    if after is None and start:  # start at a whole line
        cut = content.find(b"\n") + 1
        start, content = start + cut, content[cut:]
    return {
        "text": content.decode("utf-8", "replace"),
        "start": start,
        "end": start + len(content),
        "size": size,
    }
