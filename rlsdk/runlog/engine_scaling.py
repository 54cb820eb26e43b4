"""Two small JSON files in a run's folder: the status of its engines, and the number of engines a user requested."""

from __future__ import annotations

import json
import os
import platform
from pathlib import Path
from typing import Any

import attrs
import psutil

from rlsdk.errors import RunError
from rlsdk.runlog.folder import replace_text

REQUEST = "engines.asked.json"
STATUS = "engines.json"


@attrs.frozen(kw_only=True)
class EngineScaling:
    """Status of a run's engines.

    Attributes:
        wanted: Target number of engines.
        alive: Ranks of the engines that receive requests.
        lost: Number of engines that died so far.
        refused: Reason why the last request was refused; empty if it was fulfilled.
        driver: Process id of the run's driver.
        host: Name of the driver's machine.
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
        """The run's final status; `killed` if its driver ran on this machine and is gone; empty while it runs."""
        if not self.ended and self.host == platform.node() and not psutil.pid_exists(self.driver):
            return "killed"
        return self.ended


def request_engines(folder: Path, count: int) -> None:
    """Request a number of engines; the run reads the request at the start of each step and when it is resumed.

    Args:
        folder: Run folder.
        count: Total number of engines.
    """
    _write(folder / REQUEST, {"count": count})


def requested_engines(folder: Path) -> int | None:
    """Return the last requested number of engines; None if there was no request."""
    found = _read(folder / REQUEST)
    return None if found is None else int(found["count"])


def write_status(folder: Path, state: EngineScaling) -> None:
    """Record the current status of the engines."""
    _write(folder / STATUS, attrs.asdict(state))


def clear_status(folder: Path) -> None:
    """Delete the status left by an earlier start of the run."""
    (folder / STATUS).unlink(missing_ok=True)


def mark_ended(folder: Path, status: str) -> None:
    """Record that the run is over, keeping the last status of its engines.

    Args:
        folder: Run folder.
        status: How it ended: finished, interrupted or failed.
    """
    last = read_status(folder) or EngineScaling(wanted=0, alive=(), lost=0, refused="", driver=os.getpid())
    write_status(folder, attrs.evolve(last, ended=status))


def read_status(folder: Path) -> EngineScaling | None:
    """Return the last recorded status; None if there is none yet."""
    found = _read(folder / STATUS)
    return None if found is None else EngineScaling(**{**found, "alive": tuple(found["alive"])})


def _write(path: Path, value: Any) -> None:
    replace_text(path, json.dumps(value) + "\n")


def _read(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except ValueError as error:
        raise RunError(f"{path} is damaged: {error}; delete it") from error
