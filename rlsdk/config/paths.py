"""Relative paths in a configuration: relative to the working folder or, if missing there, to the configuration.

The configuration that a run keeps notes the working folder of its start, so that its paths are found from anywhere.
"""

from __future__ import annotations

import json
import logging
import os
import re
from collections.abc import Callable, Container, Mapping
from pathlib import Path
from typing import Any

from rlsdk.storage.location import is_url

log = logging.getLogger(__name__)
WRITTEN = frozenset({"name", "out", "mirror"})
"""Top-level keys that name outputs of a run: always relative to the working folder."""
KEYS = frozenset({"path", "file", "tokenizer", "reference", "critic", "out", "mirror"})
"""Keys whose text is a path even without a slash or suffix."""
_FUNCTION = re.compile(r"(?P<file>.+\.py):(?P<name>[A-Za-z_][\w.-]*)")
_SUFFIX = re.compile(r".+\.[A-Za-z][A-Za-z0-9]{0,7}")


_NOTE = re.compile(r"^# relative paths begin at (\".*\")$", re.MULTILINE)


def working_folder_note(run: Path) -> str:
    """Return the comment that notes the working folder in the configuration kept in a run's folder.

    The working folder is noted relative to the run's folder if it contains it, so that both may move together.
    """
    here, run = Path.cwd(), run.resolve()
    noted = os.path.relpath(here, run) if run.is_relative_to(here) else str(here)
    return f"# relative paths begin at {json.dumps(noted)}\n"


def noted_folder(text: str, run: Path) -> Path | None:
    """Return the working folder in which a run was started; None if its configuration does not note it."""
    match = _NOTE.search(text)
    return None if match is None else Path(os.path.normpath(run.resolve() / json.loads(match[1])))


def absolute_paths(tree: Mapping[str, Any], folder: Path | None) -> dict[str, Any]:
    """Return a configuration in which equal paths are equal texts.

    Args:
        tree: The configuration, nested or by dotted paths.
        folder: Folder in which its relative paths begin: paths that exist become absolute, without links. None if it
            is not known.
    """

    def written(text: str, path: str, key: str) -> str:
        file = _file_in(text, key)
        if not file:
            return text
        if folder is not None and _exists(target := Path(os.path.realpath(folder / os.path.expanduser(file)))):
            return f"{target}{text.removeprefix(file)}"
        return os.path.normpath(file) + text.removeprefix(file) if file.startswith(".") or "/.." in file else text

    return _mapped(tree, written, kept={"name"})


def resolve_paths(tree: Mapping[str, Any], source: Path) -> dict[str, Any]:
    """Resolve relative paths that are missing in the working folder, but exist in another that the configuration means.

    These are the configuration's own folder and, for the one kept by a run, the working folder of the run's start. If a
    path exists in several places, the one in the working folder is used, and a warning names the other.
    """
    try:
        started = noted_folder(source.read_text(encoding="utf-8"), source.parent)
    except (OSError, ValueError):  # an unreadable file is reported elsewhere
        started = None
    folders = {source.parent: "next to the configuration"}
    if started is not None:
        folders[started] = "where the run was started"
    elsewhere = {folder: words for folder, words in folders.items() if folder.resolve() != Path.cwd()}
    return _mapped(tree, lambda text, path, key: _located(text, path, key, elsewhere))


def _mapped(
    tree: Mapping[str, Any], change: Callable[[str, str, str], str], kept: Container[str] = WRITTEN
) -> dict[str, Any]:
    """Return a tree whose texts are changed, except those under `kept` keys; `change` gets text, path and key."""

    def mapped(value: Any, path: str, key: str) -> Any:
        if isinstance(value, Mapping):
            return {k: mapped(below, f"{path}.{k}", str(k)) for k, below in value.items()}
        if isinstance(value, list):
            return [mapped(below, f"{path}[{i}]", key) for i, below in enumerate(value)]
        return change(value, path, key) if isinstance(value, str) else value

    return {key: value if key in kept else mapped(value, key, key) for key, value in tree.items()}


def _file_in(text: str, key: str) -> str:
    """Return the file or folder that a text names; empty if it names none."""
    match = _FUNCTION.fullmatch(text)
    file = match["file"] if match else text
    named = key.rpartition(".")[2] in KEYS or "/" in file or _SUFFIX.fullmatch(file) is not None
    return file if named and len(file) <= 1024 and "\n" not in file and not is_url(file) else ""


def _located(text: str, path: str, key: str, folders: Mapping[Path, str]) -> str:
    file = _file_in(text, key)
    relative = file and not file.startswith("~") and not os.path.isabs(file)
    folder = next((folder for folder in folders if relative and _exists(folder / file)), None)
    if folder is None:
        return text
    adjacent = folder / file
    if not _exists(Path(file)):
        return f"{adjacent}{text.removeprefix(file)}"
    if not Path(file).samefile(adjacent):
        log.warning(
            "%s: %s exists in the working folder, which is used, and %s: %s",
            path,
            file,
            folders[folder],
            adjacent,
        )
    return text


def _exists(path: Path) -> bool:
    try:
        return path.exists()
    except (OSError, ValueError):  # too long for a file system, or with a null byte: not a path
        return False
