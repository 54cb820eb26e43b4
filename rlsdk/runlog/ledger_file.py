"""The ledger of a running training: `ledger.jsonl` in its folder, one line per step with the counts per source."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rlsdk.runlog.metrics import open_lines

log = logging.getLogger(__name__)
LEDGER = "ledger.jsonl"


def note_ledger(folder: Path, step: int, sources: Mapping[str, Mapping[str, int]]) -> None:
    """Append the counts of each task source after a step.

    Args:
        folder: Run folder.
        step: Number of training steps done.
        sources: Source -> count name -> number of groups since the run began.
    """
    try:
        with open_lines(folder / LEDGER) as file:
            file.write(json.dumps({"step": step, "sources": sources}) + "\n")
    except OSError as error:  # the training reports a full disk
        log.debug("%s cannot be written: %s", folder / LEDGER, error)


def read_ledger(folder: Path, most: int = 500) -> list[dict[str, Any]]:
    """Return the counts by step; if a resumed run repeated a step, its later counts.

    Args:
        folder: Run folder.
        most: Maximum number of steps; if there are more, intermediate ones are omitted.
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
