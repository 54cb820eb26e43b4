"""The ledger of a run while it trains: `ledger.jsonl` in its folder, one line a step with the counts of each source."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

log = logging.getLogger(__name__)
LEDGER = "ledger.jsonl"


def note_ledger(folder: Path, step: int, sources: Mapping[str, Mapping[str, int]]) -> None:
    """Append the counts of each source of tasks after a step.

    Args:
        folder: Run folder.
        step: Training steps done.
        sources: Name of a source -> name of a count -> number of groups since the run began.
    """
    try:
        with (folder / LEDGER).open("a", encoding="utf-8") as file:
            file.write(json.dumps({"step": step, "sources": sources}) + "\n")
    except OSError as error:  # a full disk is reported where the training needs it
        log.debug("%s cannot be written: %s", folder / LEDGER, error)


def read_ledger(folder: Path, most: int = 500) -> list[dict[str, Any]]:
    """Return the counts by step; of a step that was done twice, by a resumed run, those of the second time.

    Args:
        folder: Run folder.
        most: Maximum number of steps; of more, some are left out between the first and the last.
    """
    found: list[dict[str, Any]] = []
    try:
        lines = (folder / LEDGER).read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return []
    for line in lines:
        try:
            row = json.loads(line)
            step = int(row["step"])
        except (ValueError, LookupError, TypeError):
            continue
        while found and found[-1]["step"] >= step:
            found.pop()
        found.append(row)
    width = -(-len(found) // most) or 1
    return found[(len(found) - 1) % width :: width] if found else []
