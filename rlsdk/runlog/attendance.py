"""Number of engines of a run, actual and requested: two small files in the run's folder."""

from __future__ import annotations

import json
import os
import platform
from pathlib import Path
from typing import Any

import attrs

ASKED = "engines.asked.json"
STATE = "engines.json"


@attrs.frozen(kw_only=True)
class EngineScaling:
    """Status of a run's engines.

    Attributes:
        wanted: Target number of engines.
        alive: Ranks of the engines that receive requests.
        lost: Number of engines that died so far.
        refused: Reason why the last request was refused; empty if it was fulfilled.
        driver: Process id of the run's driver, on its machine.
        host: Name of that machine.
        ended: How the run ended: finished, interrupted or failed; empty while it runs.
    """

    wanted: int
    alive: tuple[int, ...]
    lost: int
    refused: str
    driver: int
    host: str = ""
    ended: str = ""

    @property
    def over(self) -> str:
        """How the run ended, "killed" if its driver is gone from this machine; empty while it runs."""
        return self.ended or ("killed" if self.host == platform.node() and not _is_running(self.driver) else "")


def _is_running(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except PermissionError:  # another user's
        return True
    return True


def ask(folder: Path, count: int) -> None:
    """Request a number of engines from a run, which reads the request at the start of each step and after a resume.

    Args:
        folder: Run folder.
        count: Total number of engines.
    """
    _write(folder / ASKED, {"count": count})


def asked(folder: Path) -> int | None:
    """Return the last requested number of engines; None if there was no request."""
    found = _read(folder / ASKED)
    return None if found is None else int(found["count"])


def tell(folder: Path, state: EngineScaling) -> None:
    """Say what there is."""
    _write(folder / STATE, attrs.asdict(state))


def begin(folder: Path) -> None:
    """Forget what an earlier start of the run said."""
    (folder / STATE).unlink(missing_ok=True)


def end(folder: Path, status: str) -> None:
    """Record that the run is over, keeping the last status of its engines.

    Args:
        folder: Run folder.
        status: How it ended.
    """
    last = told(folder) or EngineScaling(wanted=0, alive=(), lost=0, refused="", driver=os.getpid())
    tell(folder, attrs.evolve(last, ended=status))


def told(folder: Path) -> EngineScaling | None:
    """Return the last recorded status; None if there is none yet."""
    found = _read(folder / STATE)
    return None if found is None else EngineScaling(**{**found, "alive": tuple(found["alive"])})


def _write(path: Path, value: Any) -> None:
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    partial.write_text(json.dumps(value) + "\n", encoding="utf-8")
    partial.replace(path)


def _read(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
