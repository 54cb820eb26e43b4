"""Training runs started by the studio: processes with their own sessions, which outlive the viewer."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import attrs

from rlsdk.errors import ValueFault
from rlsdk.isolation.vitals import Identity, identify, look
from rlsdk.runlog.folder import replace_text
from rlsdk.viewer.files import read_json, tail

FOLDER = Path(".rlsdk", "studio")
"""Record of the runs started by the studio, below the folder in which the viewer was started."""
LOG_BYTES = 4000
"""Number of bytes to show from the end of a run's output."""


@attrs.frozen(kw_only=True)
class Started:
    """A training run started by the studio.

    Attributes:
        name: Name of the run.
        folder: Folder of the run.
        file: Configuration file.
        begun: Time of the last start.
        process: Process of the run.
        stops: Number of stop requests.
        code: Exit status; None while it runs, or if another server started it.
    """

    name: str
    folder: str
    file: str
    begun: float
    process: Identity
    stops: int = 0
    code: int | None = None


class Trainings:
    """Starts, stops and lists training runs."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.notes = root / FOLDER
        self._children: dict[str, subprocess.Popen[bytes]] = {}

    def start(self, name: str, folder: str, file: Path, *, resume: bool = False) -> Started:
        """Start a run, or resume it.

        Args:
            name: Checked name of the run.
            folder: Folder of the run.
            file: Configuration file.
            resume: Continue from the newest checkpoint.

        Raises:
            ValueFault: The run is already in progress.
        """
        if (known := self._known(name)) and self.runs(known):
            raise ValueFault(
                f"{name} is already running as process {known.process.pid}; stop it first, or choose another name"
            )
        self._make_notes()
        arguments = ["train", str(file), *(["--resume"] if resume else [])]
        with self._note(name, "log").open("ab") as log:
            log.write(f"$ rlsdk {' '.join(arguments)}\n".encode())
            log.flush()
            child = subprocess.Popen(
                [sys.executable, "-m", "rlsdk.cli", *arguments],
                cwd=self.root,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        self._children[name] = child
        started = Started(name=name, folder=folder, file=str(file), begun=time.time(), process=identify(child.pid))
        self._write(started)
        return started

    def stop(self, name: str) -> Started:
        """Ask a run to save and stop, like Ctrl-C; a second request stops it at once.

        Raises:
            ValueFault: The studio did not start the run, or it has ended.
        """
        known = self.known(name)
        if not self.runs(known):
            raise ValueFault(f"{name} is not running: it has ended")
        os.kill(known.process.pid, signal.SIGINT)
        known = attrs.evolve(known, stops=known.stops + 1)
        self._write(known)
        return known

    def known(self, name: str) -> Started:
        """Return a run by name.

        Raises:
            ValueFault: The studio of this folder did not start the run.
        """
        found = self._known(name)
        if found is None:
            raise ValueFault(f"{name[:200]!r} was not started by the studio of this folder")
        return found

    def runs(self, started: Started) -> bool:
        """Return whether the process of a run exists."""
        child = self._children.get(started.name)
        if child is not None and child.pid == started.process.pid:
            return child.poll() is None
        return look([started.process], measured=False)[0].state not in ("gone", "zombie")

    def listed(self) -> list[Started]:
        """Return all runs, newest first, with the exit status of those that have ended."""
        names = [path.stem for path in self.notes.glob("*.json")]
        found = [known for name in names if (known := self._known(name)) is not None]
        return sorted((self._ended(known) for known in found), key=lambda each: -each.begun)

    def output(self, name: str) -> str:
        """Return the end of a run's output."""
        return str(tail(self._note(name, "log"), LOG_BYTES)["text"])

    def copy(self, name: str, text: str) -> Path:
        """Save the configuration of a run started without a file, and return its path."""
        self._make_notes()
        path = self._note(name, "yaml")
        path.write_text(text, encoding="utf-8")
        return path

    def _ended(self, known: Started) -> Started:
        child = self._children.get(known.name)
        if known.code is None and child is not None and (code := child.poll()) is not None:
            known = attrs.evolve(known, code=code)
            self._write(known)
        return known

    def _make_notes(self) -> None:
        self.notes.mkdir(parents=True, exist_ok=True, mode=0o700)
        ignore = self.notes.parent / ".gitignore"
        if not ignore.exists():
            ignore.write_text("*\n", encoding="utf-8")

    def _note(self, name: str, suffix: str) -> Path:
        return self.notes / f"{name}.{suffix}"

    def _write(self, started: Started) -> None:
        replace_text(self._note(started.name, "json"), json.dumps(attrs.asdict(started)))

    def _known(self, name: str) -> Started | None:
        if name != Path(name).name:
            return None
        found = read_json(self._note(name, "json"))
        try:
            return Started(**{**found, "process": Identity(**found["process"])}) if found else None
        except (TypeError, KeyError):  # written by another version
            return None
