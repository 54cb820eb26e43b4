"""Recognise configurations and keys of other trainers."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from rlsdk.errors import ConfigError
from rlsdk.migration.convert import FRAMEWORKS, framework
from rlsdk.migration.reading import flattened, read_text
from rlsdk.migration.rules import Framework, KeyRule

LEAST = 3
"""Number of a trainer's keys from which on a configuration is taken for its."""
_OWN = frozenset({"tasks", "reward", "sampling", "learner", "placement", "group_size"})
"""Top-level sections that only configurations of rlsdk have."""


def recognise(source: str | Path | Mapping[str, Any]) -> Framework | None:
    """Return the trainer that a file or mapping is a configuration of; None for rlsdk itself, or if it is unknown."""
    if isinstance(source, Mapping):
        return _of_keys(source)
    path = Path(source)
    try:
        content = read_text(path) if path.is_file() else ""
    except ConfigError:
        return None
    for name in FRAMEWORKS:
        table = framework(name)
        called = any(re.search(rf"\b{each}\(", content) for each in table.constructors)
        if any(entry in content for entry in table.entries) and path.suffix not in (".yaml", ".yml"):
            return table
        if path.suffix == ".py" and called:
            return table
    try:
        loaded = yaml.safe_load(content)
    except (yaml.YAMLError, ValueError, RecursionError):
        return None
    return _of_keys(loaded) if isinstance(loaded, Mapping) else None


def _of_keys(tree: Mapping[str, Any]) -> Framework | None:
    if _OWN & tree.keys():
        return None
    keys = [key for key, _ in flattened({str(key): value for key, value in tree.items()})][:2000]
    counts = {name: sum(map(_known(name).__contains__, keys)) for name in FRAMEWORKS}
    best = max(counts, key=lambda name: counts[name])
    return framework(best) if counts[best] >= max(LEAST, 0.3 * len(keys)) else None


@cache
def _known(name: str) -> frozenset[str]:
    """Return the keys that a table lists by name, including those of older versions."""
    table = framework(name)
    return frozenset(row.key for row in table.rows if "*" not in row.key) | frozenset(table.renamed)


@cache
def aliases() -> Mapping[str, tuple[KeyRule, Framework]]:
    """Return the row of each key of other trainers, by its path, and by its end if most rows with that end agree."""
    found: dict[str, tuple[KeyRule, Framework]] = {}
    last: dict[str, list[tuple[KeyRule, Framework]]] = {}
    for table in map(framework, FRAMEWORKS):
        paths = {row.key: row for row in table.rows if row.to and "*" not in row.key}
        older = {old: paths[new] for old, new in table.renamed.items() if new in paths}
        for path, row in {**older, **paths}.items():
            found.setdefault(path, (row, table))
            parts = path.split(".")
            for start in range(1, len(parts) if row.status in ("mapped", "changed") else 0):
                last.setdefault(".".join(parts[start:]), []).append((row, table))
    for name, rows in last.items():
        most = Counter(row.to for row, _ in rows).most_common(1)[0]
        if name not in found and most[1] * 2 > len(rows):
            found[name] = next(each for each in rows if each[0].to == most[0])
    return found


def hint(key: str) -> str:
    """Say what a key of another trainer is called in rlsdk; empty if no trainer has it.

    Args:
        key: Dotted path, or the end of one.
    """
    known = aliases()
    for name in (key, key.partition(".")[2], key.rpartition(".")[2]):
        if name and name in known:
            row, table = known[name]
            # In its own section, rlsdk has this option in another component, as the caller knows better.
            section = key.partition(".")[0]
            if any(to == key or (to.startswith(f"{section}.") and to.endswith(f".{name}")) for to in row.to):
                return ""
            note = f" ({row.note})" if row.note and row.status == "changed" else ""
            return f"; {table.title}'s {name} is {' and '.join(row.to)} here{note}"
    return ""
