"""Fingerprints of the local data files of a run's tasks, so that a resumed run notices that they have changed."""

from __future__ import annotations

import glob
import hashlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from rlsdk.annotations import ANNOTATIONS
from rlsdk.config import Plan
from rlsdk.config.paths import absolute_paths
from rlsdk.readiness.base_models import samples

_WHOLE = 2**28
"""Total size of files that are read as a whole; of further ones, parts are read."""
_MOST = 10_000
"""Number of files of an option that are read; the names of further ones count."""


def data_fingerprints(plan: Plan) -> dict[str, str]:
    """Return a hash of the local files that each option of a task source names, by setting."""
    found = {}
    for setting, (_, files) in _named(plan).items():
        digest, left = hashlib.sha256(), _WHOLE
        for number, file in enumerate(files):
            digest.update(f"{file.name}\n".encode())
            if number < _MOST and file.is_file():
                size = file.stat().st_size
                left -= size
                digest.update(f"{size}\n".encode())
                digest.update(file.read_bytes() if left >= 0 else samples(file, size))
        found[setting] = digest.hexdigest()
    return found


def changed_data(plan: Plan, now: Mapping[str, str], then: Any) -> dict[str, str]:
    """Compare the data files of a run with those at a checkpoint.

    Args:
        plan: Checked plan of the resumed run.
        now: Its `data_fingerprints`.
        then: `data_fingerprints` at the checkpoint, as read from its file; None if it is of an earlier version.

    Returns:
        Setting -> what has changed, in words.
    """
    before = then if isinstance(then, Mapping) else {}
    return {
        setting: f"the contents of {text}"
        for setting, (text, _) in _named(plan).items()
        if setting in before and before[setting] != now.get(setting)
    }


def _named(plan: Plan) -> dict[str, tuple[str, list[Path]]]:
    """Return the text of each option of a task source that names local files, with these files, by setting."""
    found = {}
    for split, sources in (("train", plan.tasks_train), ("eval", plan.tasks_eval)):
        for i, source in enumerate(sources):
            for option, value in (source.reference.options if source.reference else {}).items():
                given = value if isinstance(value, list | tuple) else [value]
                texts = [text for text in given if isinstance(text, str)]
                if files := [file for text in texts for file in _files(text, option)]:
                    place = f"[{i}]" if len(sources) > 1 else ""
                    found[f"tasks.{split}{place}.{option}"] = ", ".join(texts), files
    return found


def _files(text: str, option: str) -> Iterator[Path]:
    """Yield the files that a text names: a file, a pattern, or a folder, of which hidden files do not count."""
    if any(mark in text for mark in "*?[") and not Path(text).exists():
        yield from map(Path, sorted(glob.glob(text, recursive=True)))
        return
    key = f"tasks.{option}"
    path = Path(absolute_paths({key: text}, Path.cwd())[key])
    if not path.is_absolute() or not path.exists():
        return
    if not path.is_dir():
        yield path
    elif (annotations := path / ANNOTATIONS).is_file():  # a run's folder: its other files change while it trains
        yield annotations
    else:
        yield from sorted(file for file in path.iterdir() if file.is_file() and not file.name.startswith("."))
