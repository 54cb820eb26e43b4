"""How many engines a run has, and how many a person asks for: two small files in the run's folder."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import attrs

ASKED = "engines.asked.json"
STATE = "engines.json"


@attrs.frozen(kw_only=True)
class Attendance:
    """What a run says of its engines.

    Attributes:
        wanted: How many there are to be.
        alive: Ranks of those that get requests.
        lost: How many died so far.
        refused: Why the last thing that was asked for is not done; empty if it is.
        driver: Process id of the run's driver, on its machine.
    """

    wanted: int
    alive: tuple[int, ...]
    lost: int
    refused: str
    driver: int


def ask(folder: Path, count: int) -> None:
    """Ask a run for so many engines; it looks at the beginning of each step, and after a resume.

    Args:
        folder: Of the run.
        count: Engines in all.
    """
    _write(folder / ASKED, {"count": count})


def asked(folder: Path) -> int | None:
    """How many engines somebody asked for last; None: nobody did."""
    found = _read(folder / ASKED)
    return None if found is None else int(found["count"])


def tell(folder: Path, state: Attendance) -> None:
    """Say what there is."""
    _write(folder / STATE, attrs.asdict(state))


def told(folder: Path) -> Attendance | None:
    """What the run said last; None: nothing yet."""
    found = _read(folder / STATE)
    return None if found is None else Attendance(**{**found, "alive": tuple(found["alive"])})


def _write(path: Path, value: Any) -> None:
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    partial.write_text(json.dumps(value) + "\n", encoding="utf-8")
    partial.replace(path)


def _read(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
