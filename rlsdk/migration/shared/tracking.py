"""Conversions of trackers and checkpoints that several trainers share."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rlsdk.migration.rules import Give, Given, KeyOutcome
from rlsdk.migration.values import interval, texts

TRACKERS = ("wandb", "tensorboard", "mlflow", "swanlab", "trackio")
HAVE_PROJECTS = ("wandb", "swanlab", "trackio")
BUILT_IN = {"console", "stdout", "file", "jsonl", "rich", "none"}
"""Trackers for which rlsdk needs none: it shows steps in the terminal and writes metrics.jsonl."""
KEEP_ALL = 1000
"""Checkpoints to keep where the other trainer keeps all."""


def trackers(value: Any, options: Mapping[str, Mapping[str, Any]]) -> KeyOutcome:
    """Convert the names of trackers; those that rlsdk lacks are noted.

    Args:
        value: The names.
        options: Name of a tracker -> its options; those without a value are left out.
    """
    names = [name.lower() for name in texts(value)]
    made = {name: {key: str(each) for key, each in more.items() if each} for name, more in options.items()}
    found = {
        "trackers": [{"use": name, **made[name]} if made.get(name) else name for name in names if name in TRACKERS]
    }
    lacking = [name for name in names if name not in TRACKERS and name not in BUILT_IN]
    if lacking:
        return KeyOutcome(found, f"there is no tracker {' or '.join(lacking)}: write one (howto/plugin.md)", "missing")
    return KeyOutcome(found, "" if found["trackers"] else "metrics.jsonl and the terminal always get them", "mapped")


def trackers_with(project: str, usual: str = "") -> Give:
    """Return the converter of the names of trackers; a key names the project."""
    return lambda value, given: trackers(value, {key: {"project": given.get(project, usual)} for key in HAVE_PROJECTS})


def checkpoints_kept(saved_every: str) -> Give:
    """Return the converter of the number of checkpoints to keep; 0 or less keeps all.

    Args:
        saved_every: Key of the steps between checkpoints, below 1 for none.
    """

    def give(value: int, given: Given) -> dict[str, Any]:
        if given.read(saved_every, interval, 0) == 0:
            return {}
        return {"checkpoint.keep": value if value > 0 else KEEP_ALL}

    return give
