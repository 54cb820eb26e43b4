"""The studio: a checker, configuration files below the folder in which the viewer was started, and runs.

The runs are processes with their own sessions, which outlive the viewer.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import attrs

from rlsdk.errors import ConfigError, ValueFault
from rlsdk.isolation.vitals import Identity, identify, look
from rlsdk.runlog.files import read_json, tail
from rlsdk.runlog.folder import MARKER, replace_text
from rlsdk.viewer.studio.checks import Checker

SUFFIXES = (".yaml", ".yml")
MOST_BYTES = 2**20
"""Maximum size of a configuration file in bytes."""
MOST_FILES = 500
"""Maximum number of files to list."""
DEPTH = 6
"""Maximum depth of folders to search."""
_SKIPPED = ("node_modules", "site-packages", "__pycache__")


class Studio:
    """Write configurations and start runs in the folder where the viewer was started, their working folder."""

    def __init__(self, root: Path) -> None:
        self.root = root.resolve()
        self.checker = Checker()
        self.files = ConfigFiles(self.root)
        self.trainings = Trainings(self.root)

    async def start(self, text: str, file: str, version: str, *, resume: bool) -> dict[str, Any]:
        """Check a configuration, save it, and start a run.

        A configuration without a file is copied to the studio's notes. Returns `name` of the run, `file` and its new
        `version`.

        Raises:
            ConfigError: The configuration has faults, or its folder already holds a run.
            ValueFault: The file cannot be saved, or the run is already running.
        """
        found = await self.checker.check({"text": text, "file": file and str(self.files.path(file))})
        if faults := [*found["faults"], *found["warnings"]]:
            raise ConfigError(f"{each['path']}: {each['message']}".removeprefix(": ") for each in faults)
        name, folder = found["name"], found["folder"]
        if found["exists"] and not resume:
            raise ConfigError([f"name: {folder} already holds a run; resume it, or choose another name"])
        if file:
            version = self.files.save(file, text, version)
        path = Path(file) if file else self.trainings.copy(name, text).relative_to(self.root)
        self.trainings.start(name, folder, path, resume=resume)
        return {"name": name, "file": file, "version": version}

    def resume(self, name: str) -> Started:
        """Continue a run that was started here, with its current configuration.

        Raises:
            ValueFault: The run was not started here, or is running.
        """
        known = self.trainings.known(name)
        return self.trainings.start(name, known.folder, Path(known.file), resume=True)


class ConfigFiles:
    """The configuration files of a folder."""

    def __init__(self, root: Path) -> None:
        self.root = root.resolve()

    def names(self) -> list[str]:
        """Return the paths of the files, relative to the folder, without run folders and hidden files."""
        found: list[str] = []
        for path in self._walk():
            found.append(path)
            if len(found) == MOST_FILES:
                break
        return sorted(found, key=lambda each: (each.count("/"), each))

    def _walk(self) -> Iterator[str]:
        for folder, below, files in os.walk(self.root):
            here = Path(folder).relative_to(self.root)
            inner = [each for each in below if not each.startswith(".") and each not in _SKIPPED]
            inner = [each for each in inner if not (Path(folder) / each / MARKER).exists()]
            below[:] = sorted(inner) if len(here.parts) < DEPTH else []
            yield from (
                (here / name).as_posix()
                for name in sorted(files)
                if name.endswith(SUFFIXES) and not name.startswith(".")
            )

    def path(self, name: str) -> Path:
        """Return the path of a file by its name.

        Raises:
            ValueFault: The name is not that of a YAML file below the folder.
        """
        path = Path(name)
        wrong = (
            not name.endswith(SUFFIXES)
            or path.is_absolute()
            or any(part.startswith(".") for part in path.parts)
            or re.search(r"[\\\x00-\x1f\x7f]", name) is not None
            or len(os.fsencode(name)) > 1000
        )
        if wrong:
            raise ValueFault(
                f"{name[:200]!r} is not a file of the studio; expected a path below {self.root.name}/ that ends in "
                ".yaml, such as 'configs/first.yaml', without hidden folders"
            )
        found = self.root / path
        if not found.resolve().is_relative_to(self.root):  # by a symbolic link
            raise ValueFault(f"{name!r} leads out of the folder {self.root.name}/ in which `rlsdk view` was started")
        if any((parent / MARKER).exists() for parent in found.parents if parent.is_relative_to(self.root)):
            raise ValueFault(f"{name!r} is in a run's folder, which rlsdk manages itself; choose another folder")
        return found

    def read(self, name: str) -> tuple[str, str]:
        """Return the text of a file, and its version to detect later changes.

        Raises:
            ValueFault: There is no such file, or it is too large or not text.
        """
        path = self.path(name)
        try:
            if path.stat().st_size > MOST_BYTES:
                raise ValueFault(f"{name} has more than {MOST_BYTES >> 20} MiB; that is not a configuration")
            content = path.read_bytes()
            return content.decode(), _version(content)
        except OSError as error:
            raise ValueFault(f"{name} cannot be read: {error.strerror}") from error
        except UnicodeDecodeError as error:
            raise ValueFault(f"{name} is not UTF-8 text") from error

    def save(self, name: str, text: str, version: str) -> str:
        """Write a file, unless its version is no longer the given one (empty for a new file); return the new version.

        Raises:
            ValueFault: The path is not below the folder, or the file was changed meanwhile or cannot be written.
        """
        path, content = self.path(name), text.encode()
        if len(content) > MOST_BYTES:
            raise ValueFault(f"the text has more than {MOST_BYTES >> 20} MiB; that is not a configuration")
        before = _version(path.read_bytes()) if path.is_file() else ""
        if before != version and before != _version(content):
            what = "was changed meanwhile; open it again" if version else "exists already; open it"
            raise ValueFault(f"{name} {what}, or choose another name")
        try:
            replace_text(path, text)
        except OSError as error:
            raise ValueFault(f"{name} cannot be written: {error.strerror}; does its folder exist?") from error
        return _version(content)


def _version(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:16]


FOLDER = Path(".rlsdk", "studio")
"""Record of the runs started by the studio, below the folder in which the viewer was started."""
LOG_BYTES = 4000
"""Number of bytes to show from the end of a run's output."""


@attrs.frozen(kw_only=True)
class Started:
    """A training run started by the studio."""

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
        replace_text(path, text)
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
            replace_text(ignore, "*\n")

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
