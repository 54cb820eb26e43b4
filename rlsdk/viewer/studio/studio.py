"""The studio: a checker, configuration files and runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rlsdk.errors import ConfigError
from rlsdk.viewer.studio.checks import Checker
from rlsdk.viewer.studio.files import ConfigFiles
from rlsdk.viewer.studio.processes import Started, Trainings


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
