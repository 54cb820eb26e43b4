"""Temporary folders that do not outlive their program, even if it is killed: the next one deletes what it left."""

from __future__ import annotations

import fcntl
import os
import shutil
import stat
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory, gettempdir

_NEW_SECONDS = 60.0
"""Age in seconds up to which a folder is kept: its program may not have locked it yet."""


@contextmanager
def scratch_folder(prefix: str, parent: str | Path | None = None) -> Iterator[Path]:
    """Yield a temporary folder, which is locked and deleted with the block.

    The first one of its kind in a process also deletes the folders of programs that were killed; only theirs have no
    lock.

    Args:
        prefix: Start of its name, used for nothing else.
        parent: Folder to create it in; by default, that of temporary files.
    """
    _remove_left(str(parent or gettempdir()), prefix)
    with TemporaryDirectory(dir=parent, prefix=prefix, ignore_cleanup_errors=True) as name:
        folder = os.open(name, os.O_RDONLY)
        try:
            with suppress(OSError):  # a file system without locks, where a killed program's folder stays
                fcntl.flock(folder, fcntl.LOCK_SH | fcntl.LOCK_NB)
            yield Path(name)
        finally:
            os.close(folder)


@cache
def _remove_left(parent: str, prefix: str) -> None:
    """Delete this user's folders whose programs have ended."""
    for path in Path(parent).glob("*"):
        if not path.name.startswith(prefix):
            continue
        with suppress(OSError):  # another program may delete it, too
            status = path.lstat()
            mine = stat.S_ISDIR(status.st_mode) and status.st_uid == os.getuid()
            if not mine or time.time() - status.st_mtime < _NEW_SECONDS:
                continue
            folder = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
            try:
                fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)  # raises while its program holds it
                shutil.rmtree(path)
            finally:
                os.close(folder)
