"""Faults of a configuration that was written for another trainer, or that has keys of one."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rlsdk.config.tree import leaves

_UNKNOWN = re.compile(r"(?P<path>[\w.\[\]@-]+): (?P<says>unknown (?:key|option) '(?P<name>[^']+)').*", re.DOTALL)


def explained(source: str | Path | Mapping[str, Any], tree: Mapping[str, Any], faults: Sequence[str]) -> list[str]:
    """Say whose configuration it is, where it is another trainer's, or what its keys are called here.

    Args:
        source: The file or mapping that was checked.
        tree: What was read of it, with overrides.
        faults: What is wrong with it.
    """
    from rlsdk.migration.aliases import hint, recognise  # only where something is wrong

    table = recognise(source)
    if table is not None:
        name = "this mapping" if isinstance(source, Mapping) else str(source)
        file = "FILE" if isinstance(source, Mapping) else name
        return [
            f"{name} looks like a config of {table.title}; `rlsdk migrate {table.name} {file}` writes one of rlsdk and "
            "tells what became of every key"
        ]
    told = []
    for fault in faults:
        match = _UNKNOWN.fullmatch(fault)
        known = []
        if match:
            below = [path for path, _ in leaves(tree) if path.startswith((f"{match['path']}.", f"{match['path']}["))]
            known = list(dict.fromkeys(filter(None, map(hint, below or [match["path"]]))))
        told.append(f"{match['path']}: {match['says']}{''.join(known)}" if match and known else fault)
    return told
