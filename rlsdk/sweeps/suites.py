"""Suites: folders of configurations that algorithms are compared on."""

from __future__ import annotations

from pathlib import Path

import rlsdk
from rlsdk.errors import ConfigError

FOLDER = Path("examples") / "suites"
NANO = "nano"


def suite_tasks(suite: str) -> dict[str, Path]:
    """Return the tasks of a suite: name -> configuration.

    Args:
        suite: Name of a suite that comes with the repository, or a folder of configurations.

    Raises:
        ConfigError: There is no such suite.
    """
    roots = [Path.cwd() / FOLDER, Path(rlsdk.__file__).parents[1] / FOLDER]
    folder = next((each for each in (Path(suite), *(root / suite for root in roots)) if each.is_dir()), None)
    if folder is None:
        there = sorted({each.name for root in roots if root.is_dir() for each in root.iterdir() if each.is_dir()})
        raise ConfigError([f"--suite: {_missing(suite, there)}"])
    tasks = {file.stem: file for file in sorted(folder.glob("*.yaml"))}
    if not tasks:
        raise ConfigError([f"--suite: {folder} holds no configuration; a suite is a folder with one YAML file a task"])
    return tasks


def _missing(suite: str, there: list[str]) -> str:
    if there:
        return f"unknown suite {suite!r}; there are: {', '.join(there)}; or give a folder of configurations"
    return (
        f"{suite!r} is not here: the suites and the models that they train are part of the repository, not of the "
        "installed package; clone it and run this in its folder, or give a folder of your own configurations"
    )
