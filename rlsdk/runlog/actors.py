"""JSON files about a run's processes, for other programs: its actors, its engines, and how many a user requested."""

from __future__ import annotations

import json
import logging
import os
import platform
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs
import psutil

from rlsdk.contracts.rollouts import EngineStatus
from rlsdk.errors import RunError
from rlsdk.runlog.folder import MARKER, replace_text

if TYPE_CHECKING:
    from rlsdk.cluster.health import Watched
    from rlsdk.isolation.vitals import Vitals


log = logging.getLogger(__name__)
ACTORS = "actors.json"
EVERY_SECONDS = 5.0
"""Seconds between updates of the file."""
REQUEST = "engines.asked.json"
STATUS = "engines.json"


@attrs.frozen(kw_only=True)
class ActorState:
    """State of one process.

    Attributes:
        name: Name of the actor, such as `engine 0`; `driver` for the training's own process.
        pid: Process id; 0 before the actor has started to work.
        host: Name of its machine.
        state: State from `isolation.vitals`: running, disk, stopped, zombie, gone or unknown; `starting` before.
        memory: Resident memory in bytes.
        silent: Reason why it counts as silent; empty while it works.
        silent_for: Seconds since it became silent.
        log: File with its output.
    """

    name: str
    pid: int = 0
    host: str = ""
    state: str = "starting"
    memory: int = 0
    silent: str = ""
    silent_for: float = 0.0
    log: str = ""

    @property
    def is_gone(self) -> bool:
        """True if the process ran on this machine and is gone."""
        if not self.pid or self.host != platform.node():
            return False
        return not psutil.pid_exists(self.pid)


@attrs.frozen
class Actors:
    """Snapshot of a run's processes and stage; `written` is its time in seconds since 1970."""

    written: float
    stage: str
    actors: tuple[ActorState, ...]

    def process(self, name: str) -> ActorState | None:
        """Return a process by name; None if there is none."""
        return next((each for each in self.actors if each.name == name), None)

    def as_json(self, now: float) -> list[dict[str, Any]]:
        """Return the processes as JSON, with the state of processes that have ended meanwhile updated."""
        gone = [attrs.evolve(each, state="gone") if each.is_gone else each for each in self.actors]
        older = now - self.written
        return [attrs.asdict(a) | ({"silent_for": a.silent_for + older} if a.silent else {}) for a in gone]


class ActorsFile:
    """Write the processes of a run to its folder every few seconds."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / ACTORS
        self._written, self._begun = float("-inf"), False

    def report(self, stage: str, seen: Sequence[tuple[Watched, Vitals]], now: float) -> None:
        """Replace the file, unless it was just written or the folder does not exist yet."""
        if now - self._written < EVERY_SECONDS or not (self._path.parent / MARKER).is_file():
            return
        if self._begun and not seen:  # the run ends: keep the last snapshot of its actors
            return
        self._written, self._begun = now, bool(seen)
        own = ActorState(
            name="driver",
            pid=os.getpid(),
            host=platform.node(),
            state="running",
            memory=int(psutil.Process().memory_info().rss),
            log="driver.log",
        )
        actors = [own, *(_state(watched, vitals, now) for watched, vitals in seen)]
        content = {"written": time.time(), "stage": stage, "actors": [attrs.asdict(each) for each in actors]}
        try:
            replace_text(self._path, json.dumps(content) + "\n")
        except OSError as error:  # the training reports a full disk
            log.debug("%s cannot be written: %s", self._path, error)


def _state(watched: Watched, vitals: Vitals, now: float) -> ActorState:
    known = watched.identity
    since, why = watched.silent or (now, "")
    return ActorState(
        name=watched.name,
        pid=known.pid if known else 0,
        host=known.host if known else "",
        state=vitals.state if known else "starting",
        memory=vitals.memory,
        silent=why,
        silent_for=round(now - since, 1),
        log=Path(watched.log).name,
    )


def read(folder: Path) -> Actors | None:
    """Return the last snapshot of a run's processes; None if there is none."""
    try:
        found = json.loads((folder / ACTORS).read_text(encoding="utf-8"))
        return Actors(found["written"], found["stage"], tuple(ActorState(**each) for each in found["actors"]))
    except (OSError, ValueError, LookupError, TypeError):
        return None


@attrs.frozen(kw_only=True)
class EngineScaling(EngineStatus):
    """Status of a run's engines, and of the run.

    Attributes:
        driver: Process id of the run's driver.
        host: Name of the driver's machine.
        ended: How the run ended: finished, interrupted or failed; empty while it runs.
    """

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
    """Request a number of engines; the run reads the request at the start of each step and when it is resumed."""
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
    """Record that the run is over (finished, interrupted or failed), keeping the last status of its engines."""
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
