"""Conversions of data, chat templates, rewards, trackers and checkpoints that several trainers share."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import PurePath
from typing import Any

from rlsdk.migration.hydra import from_environment
from rlsdk.migration.rules import NOTES, Give, Given, KeyOutcome
from rlsdk.migration.values import UnfitError, interval, text, texts

KNOWN_TASKS = (
    ("countdown", re.compile(r"countdown|tiny_?zero", re.IGNORECASE)),
    ("math", re.compile(r"gsm8k|math|aime|amc|olympiad|polaris|deepscaler|geo3k|geometry3k", re.IGNORECASE)),
)
"""Reward, and pattern of the names of data sets that it fits."""
UNREAD = {"csv", "tsv", "txt", "arrow"}
"""Endings of data files that no source reads."""
TEMPLATE_NOTE = "set model.renderer: {use: template, file: FILE}"


def dataset(paths: Any, split: str, columns: Mapping[str, str], **more: Any) -> dict[str, Any]:
    """Return a source of tasks from files or a data set of the hub.

    Args:
        paths: Texts: files, folders or the name of a data set.
        split: Split of the data set.
        columns: Column in rlsdk's terms -> its name in the data.
        more: Further options of the source.
    """
    found = [each for each in texts(paths) if each not in ("nan", "")]
    if not found:
        raise UnfitError("no data is given")
    extra = {**({"columns": dict(columns)} if columns else {}), **more}
    endings = {from_environment(name, {}).rsplit("@")[0].rsplit(".", 1)[-1].lower() for name in found}
    path = found[0] if len(found) == 1 else found
    if endings <= {"parquet"}:
        return {"use": "parquet", "path": path, **extra}
    if endings <= {"jsonl", "json", "gz"} or endings & UNREAD:  # a note says that the latter cannot be read
        return {"use": "jsonl", "path": path, **extra}
    if len(found) == 1:
        return {"use": "hub", "name": found[0], "split": split, **extra}
    return {"use": "jsonl", "path": path, "split": split, **extra}


def unshuffled(sources: Any, *, sort_by: str | None = None) -> Any:
    """Return a source of files, or a list of them, whose order training keeps.

    Args:
        sources: Source or sources that `dataset` returned; None if there is none.
        sort_by: Column to sort by, if not the order of the data.
    """
    if isinstance(sources, list):
        return [unshuffled(each, sort_by=sort_by) for each in sources]
    return sources and {**sources, **({"sort_by": sort_by} if sort_by else {"shuffle": False})}


def template_variables(given: Given, section: str) -> dict[str, Any]:
    """Return the variables of the chat template, which the other trainer has in a section."""
    variables = given.section(section)
    return {"model.renderer.variables": dict(variables)} if variables else {}


def template_file(value: Any, _: Given) -> KeyOutcome:
    """Convert the path of a chat template; other trainers also take a template from another model's tokenizer."""
    if PurePath(text(value)).suffix in (".jinja", ".jinja2", ".j2"):
        return KeyOutcome({"model.renderer.file": text(value)})
    return KeyOutcome.missing(f"save the chat_template of its tokenizer to a file, and {TEMPLATE_NOTE}")


def likely_reward(*hints: Any) -> dict[str, Any]:
    """Guess a built-in reward from names of data sets or projects; the settings come with a note that says so."""
    for name, pattern in KNOWN_TASKS:
        found = next((str(hint) for hint in hints if hint is not None and pattern.search(str(hint))), None)
        if found is not None:
            reward = {"use": name} if name == "countdown" else {"use": name, "strict": False}
            return {"reward": reward, NOTES: (f"reward: {name} is a guess from the name {found!r}: please check",)}
    return {NOTES: ("reward: no key names one; add one (`rlsdk plugins reward` lists the available rewards)",)}


def function(path: Any, name: Any, style: str, arguments: Any = None) -> dict[str, Any]:
    """Return the reward that calls another trainer's function, given by file and name."""
    found = {"use": "foreign", "path": f"{text(path)}:{text(name)}", "style": style}
    return {**found, "arguments": dict(arguments)} if isinstance(arguments, Mapping) and arguments else found


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
