"""The processes of a run as seen by its watchdog, in `actors.json` in the run's folder, for other programs."""

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

from rlsdk.runlog.folder import MARKER, replace_text

if TYPE_CHECKING:
    from rlsdk.cluster.health import Watched
    from rlsdk.isolation.vitals import Vitals

log = logging.getLogger(__name__)
ACTORS = "actors.json"
EVERY_SECONDS = 5.0
"""Seconds between updates of the file."""


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
        import psutil

        return not psutil.pid_exists(self.pid)


@attrs.frozen
class Actors:
    """Snapshot of a run's processes.

    Attributes:
        written: Time of the observation, in seconds since 1970.
        stage: Stage of the run, and for how long.
        actors: The processes.
    """

    written: float
    stage: str
    actors: tuple[ActorState, ...]

    def process(self, name: str) -> ActorState | None:
        """Return a process by name; None if there is none."""
        return next((each for each in self.actors if each.name == name), None)

    def as_json(self, now: float) -> list[dict[str, Any]]:
        """Return the processes as JSON, with the state of processes that have ended meanwhile updated.

        Args:
            now: Current time.
        """
        gone = [attrs.evolve(each, state="gone") if each.is_gone else each for each in self.actors]
        older = now - self.written
        return [attrs.asdict(a) | ({"silent_for": a.silent_for + older} if a.silent else {}) for a in gone]


class ActorsFile:
    """Write the processes of a run to its folder every few seconds."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / ACTORS
        self._written, self._begun = float("-inf"), False

    def report(self, stage: str, seen: Sequence[tuple[Watched, Vitals]], now: float) -> None:
        """Replace the file, unless it was just written or the folder does not exist yet.

        Args:
            stage: Stage of the run, and for how long.
            seen: Processes of the run with their vitals.
            now: Time on the clock of the watchdog.
        """
        if now - self._written < EVERY_SECONDS or not (self._path.parent / MARKER).is_file():
            return
        if self._begun and not seen:  # the run ends: keep the last snapshot of its actors
            return
        self._written, self._begun = now, bool(seen)
        actors = [_driver(), *(_state(watched, vitals, now) for watched, vitals in seen)]
        content = {"written": time.time(), "stage": stage, "actors": [attrs.asdict(each) for each in actors]}
        try:
            replace_text(self._path, json.dumps(content) + "\n")
        except OSError as error:  # the training reports a full disk
            log.debug("%s cannot be written: %s", self._path, error)


def _driver() -> ActorState:
    import psutil

    memory = int(psutil.Process().memory_info().rss)
    return ActorState(
        name="driver", pid=os.getpid(), host=platform.node(), state="running", memory=memory, log="driver.log"
    )


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
