"""Snapshot a checkpoint for an upload, while the run continues to write and delete files."""

from __future__ import annotations

import os
import shutil
import sqlite3
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

import attrs

STAGE = ".upload"
"""Folder of snapshots within a run's folder."""
_LEFT_OUT = ("cache", "checkpoints", "logs")
"""Folders of a run that are not needed to resume it."""


@attrs.define(eq=False)
class Staged:
    """Snapshot of a checkpoint and of the run's own files at that time.

    Attributes:
        step: Step of the checkpoint.
        folder: Folder with `step-N/` (hard links, which take no space) and `step-N.run/`.
        database: Connection to the rollout database with an open transaction, which sees the state at the snapshot;
            None if there is no such file, or it has been copied.
        sent: Names of uploaded files.
        published: True once the manifest has been uploaded.
    """

    step: int
    folder: Path
    database: sqlite3.Connection | None = None
    sent: set[str] = attrs.field(factory=set)
    published: bool = False

    def finish(self) -> None:
        """Copy the database, which may take a long time."""
        if self.database is None:
            return
        partial = self.folder / "database.partial"
        with closing(sqlite3.connect(partial)) as copy:
            self.database.backup(copy)
        partial.replace(self.folder / f"step-{self.step}.run" / "rollouts.db")
        self.database.close()
        self.database = None

    def files(self) -> dict[str, int]:
        """Return the names of all files below the folder, with their sizes in bytes."""
        found = sorted(path for path in self.folder.rglob("*") if path.is_file())
        return {path.relative_to(self.folder).as_posix(): path.stat().st_size for path in found}

    def discard(self) -> None:
        """Delete the snapshot."""
        if self.database is not None:
            self.database.close()
            self.database = None
        shutil.rmtree(self.folder, ignore_errors=True)


def stage(run: Path, step: int, database: str) -> Staged:
    """Take a snapshot of a checkpoint and of the run's own files.

    Args:
        run: Local folder of the run.
        step: Step of the checkpoint.
        database: Name of the SQLite file of rollouts.

    Raises:
        OSError: The disk is full, or a file cannot be read.
    """
    staged = Staged(step, run / STAGE / f"step-{step}")
    shutil.rmtree(staged.folder, ignore_errors=True)
    try:
        checkpoint = f"step-{step}"
        shutil.copytree(run / "checkpoints" / checkpoint, staged.folder / checkpoint, copy_function=_link_or_copy)
        extra = staged.folder / f"step-{step}.run"
        extra.mkdir()
        for path in own_files(run, database):
            target = extra / path.relative_to(run)
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(path, target)
        if (run / database).is_file():
            # In WAL mode, a reader within a transaction sees the database as it was when the transaction began.
            staged.database = sqlite3.connect(
                f"{(run / database).resolve().as_uri()}?mode=ro",
                uri=True,
                check_same_thread=False,
                isolation_level=None,
            )
            staged.database.execute("BEGIN")
            staged.database.execute("SELECT count(*) FROM sqlite_master").fetchone()
    except BaseException:
        staged.discard()
        raise
    return staged


def own_files(run: Path, database: str, *, left_out: Sequence[str] = _LEFT_OUT) -> list[Path]:
    """Return the files of a run except checkpoints and database: configuration, metrics, tracker ids, marker.

    Args:
        run: Local folder of the run.
        database: Name of the SQLite file of rollouts.
        left_out: Names of folders to omit.
    """
    found = []
    for path in run.iterdir():
        if path.name in (*left_out, STAGE) or path.name.startswith(database) or path.name.endswith(".partial"):
            continue
        found += [path] if path.is_file() else [below for below in path.rglob("*") if below.is_file()]
    return sorted(found)


def _link_or_copy(source: str, target: str) -> None:
    try:
        os.link(source, target)
    except OSError:  # some file systems have no hard links
        shutil.copy2(source, target)
