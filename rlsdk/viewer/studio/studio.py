"""The studio: a checker, runs, and configuration files below the folder in which the viewer was started."""

from __future__ import annotations

import hashlib
import os
import re
import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rlsdk.errors import ConfigError, ValueFault
from rlsdk.runlog.folder import MARKER
from rlsdk.viewer.studio.checks import Checker
from rlsdk.viewer.studio.processes import Started, Trainings

SUFFIXES = (".yaml", ".yml")
MOST_BYTES = 2**20
"""Maximum size of a configuration file in bytes."""
MOST_FILES = 500
"""Maximum number of files to list."""
DEPTH = 6
"""Maximum depth of folders to search."""
_SKIPPED = ("node_modules", "site-packages", "__pycache__")


class Studio:
    """Write configurations and start runs in one folder.

    Attributes:
        root: Folder in which the viewer was started: the working folder of runs, above all files.
        checker: Checks configurations.
        files: Configuration files.
        trainings: Runs started here.
    """

    def __init__(self, root: Path) -> None:
        self.root = root.resolve()
        self.checker = Checker()
        self.files = ConfigFiles(self.root)
        self.trainings = Trainings(self.root)

    async def start(self, text: str, file: str, version: str, *, resume: bool) -> dict[str, Any]:
        """Check a configuration, save it, and start a run.

        Args:
            text: The configuration.
            file: Its file below the folder; empty if it has none, in which case the studio keeps a copy.
            version: Version of the file when it was opened.
            resume: Continue the run in its folder.

        Returns:
            `name` of the run, `file` and its new `version`.

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

        Args:
            name: Path relative to the folder.

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
        """Write a file atomically, and return its version.

        Args:
            name: Path relative to the folder.
            text: New content.
            version: Version of the file when it was opened; empty for a new file.

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
        temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
        try:
            temporary.write_bytes(content)
            os.replace(temporary, path)
        except OSError as error:
            temporary.unlink(missing_ok=True)
            raise ValueFault(f"{name} cannot be written: {error.strerror}; does its folder exist?") from error
        return _version(content)


def _version(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:16]
