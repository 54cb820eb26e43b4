"""Parts of the studio: a checker, files and trainings."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rlsdk.errors import ConfigError
from rlsdk.viewer.studio.checks import Checker
from rlsdk.viewer.studio.files import ConfigFiles
from rlsdk.viewer.studio.processes import Started, Trainings


class Studio:
    """Writes configurations and starts runs in one folder.

    Attributes:
        root: Folder that the viewer was started in: runs have it as their working folder, and files are below it.
        checker: Checks configurations.
        files: Configuration files.
        trainings: Runs that were started here.
    """

    def __init__(self, root: Path) -> None:
        self.root = root.resolve()
        self.checker = Checker()
        self.files = ConfigFiles(self.root)
        self.trainings = Trainings(self.root)

    async def start(self, text: str, file: str, version: str, *, resume: bool) -> dict[str, Any]:
        """Check a configuration, save it, and start its run.

        Args:
            text: The configuration.
            file: Its file below the folder; empty if it has none, and the studio keeps a copy.
            version: Version of the file that was opened.
            resume: Continue the run that its folder holds.

        Returns:
            `name` of the run, `file` and its new `version`.

        Raises:
            ConfigError: The configuration has faults, or its folder holds a run already.
            ValueFault: The file cannot be saved, or the run runs already.
        """
        found = await self.checker.check({"text": text, "file": file and str(self.files.path(file))})
        if faults := [*found["faults"], *found["warnings"]]:
            raise ConfigError(f"{each['path']}: {each['message']}".removeprefix(": ") for each in faults)
        name, folder = found["name"], found["folder"]
        if found["exists"] and not resume:
            raise ConfigError([f"name: {folder} holds a run already; resume it, or give another name"])
        if file:
            version = self.files.save(file, text, version)
        path = Path(file) if file else self.trainings.copy(name, text).relative_to(self.root)
        self.trainings.start(name, folder, path, resume=resume)
        return {"name": name, "file": file, "version": version}

    def resume(self, name: str) -> Started:
        """Continue a run that was started here with its configuration as it is now.

        Raises:
            ValueFault: It was not started here, or runs.
        """
        known = self.trainings.known(name)
        return self.trainings.start(name, known.folder, Path(known.file), resume=True)
