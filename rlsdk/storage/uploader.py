"""Uploads snapshots of checkpoints in a thread; a failed or slow upload neither ends nor delays the training."""

from __future__ import annotations

import logging
import os
import shutil
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import attrs

from rlsdk.errors import first_line
from rlsdk.storage import copies
from rlsdk.storage.copies import Copy
from rlsdk.storage.lock import RemoteLock
from rlsdk.storage.remote import RemoteFolder

STAGE = ".upload"
"""Folder of snapshots within a run's folder."""
_LEFT_OUT = ("cache", "checkpoints", "logs", "serve")
"""Folders of a run that are not needed to resume it."""
log = logging.getLogger(__name__)


@attrs.define(eq=False)
class Staged:
    """Snapshot of a checkpoint and of the run's own files at that time.

    Attributes:
        step: Step of the checkpoint.
        folder: Folder with `step-N/` (hard links, which take no space) and `step-N.run/`.
        database: Connection to the rollout database with an open transaction, which sees the state at the snapshot;
            None if there is no such file, or it has been copied.
        prepared: True once nothing of an earlier upload of this step is left in the remote folder.
        sent: Names of uploaded files.
        published: True once the manifest has been uploaded.
    """

    step: int
    folder: Path
    database: sqlite3.Connection | None = None
    prepared: bool = False
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
    """Return the files of a run except checkpoints and database: configuration, metrics, tracker ids, marker."""
    found = []
    for path in run.iterdir():
        if path.name in (*left_out, STAGE) or path.name.startswith(database) or path.name.endswith(".partial"):
            continue
        # Evaluations have compiled programs of their own, which may be written right now.
        below = (each for each in path.rglob("*") if "cache" not in each.relative_to(run).parts)
        found += [path] if path.is_file() else [each for each in below if each.is_file()]
    return sorted(found)


def _link_or_copy(source: str, target: str) -> None:
    try:
        os.link(source, target)
    except OSError:  # some file systems have no hard links
        shutil.copy2(source, target)


@attrs.frozen(kw_only=True)
class UploadTimes:
    """Retries and time limits of uploads.

    Attributes:
        first_retry: Seconds before a failed upload is retried; doubled after each further failure.
        longest_retry: Maximum seconds between retries.
        last_attempts: Attempts after the end of the run; if all fail, the last checkpoint stays in the mirror only.
        stall: Seconds without progress after which an upload is abandoned at the end of the run.
    """

    first_retry: float = 5.0
    longest_retry: float = 300.0
    last_attempts: int = 4
    stall: float = 300.0


class LostLockError(Exception):
    """Another program has taken over the remote folder."""


class Uploader:
    """Uploads checkpoints, always the newest; if they come faster than they can be uploaded, older ones are skipped.

    Args:
        run: Local folder of the run.
        remote: Its remote folder, locked.
        lock: That lock.
        keep: Number of checkpoints to keep in the remote folder.
        database: Name of the SQLite file of rollouts.
        known: Called with the id of an upload before it is published.
        times: Retries and time limits.
    """

    def __init__(
        self,
        run: Path,
        remote: RemoteFolder,
        lock: RemoteLock,
        *,
        keep: int,
        database: str,
        known: Callable[[str], None],
        times: UploadTimes | None = None,
    ) -> None:
        self._run, self._remote, self._lock, self._keep, self._database = run, remote, lock, keep, database
        self._known, self._times = known, times or UploadTimes()
        self._changed = threading.Condition()
        self._waiting: Staged | None = None
        self._working = self._closing = self._given_up = self._told_of_refusal = False
        self._moved = time.monotonic()
        self._failures, self._last_error = 0, ""
        self._last_failed: int | None = None
        self.uploaded: list[int] = []
        self.left_out: list[int] = []
        shutil.rmtree(run / STAGE, ignore_errors=True)  # left by a program that was killed
        self._runs = False  # the thread, which ends once the last checkpoint is uploaded

    def submit(self, step: int) -> None:
        """Queue a checkpoint that was just written for its upload; return at once, and never raise."""
        if self._given_up:
            return
        try:
            staged = stage(self._run, step, self._database)
        except Exception as error:  # noqa: BLE001 - an upload never ends a run
            self._warn(step, error, "it is skipped; the next one will be uploaded")
            return
        with self._changed:
            if self._waiting is not None:
                self._leave_out(self._waiting)
            self._waiting, self._closing = staged, False  # a trainer that is called by hand may train again
            self._changed.notify_all()
            if not self._runs:
                self._runs = True
                threading.Thread(target=self._work, name="uploads", daemon=True).start()

    def finish(self) -> dict[str, Any]:
        """Wait until the last checkpoint is uploaded or abandoned; return a summary of all uploads.

        Raises:
            KeyboardInterrupt: The user interrupted the wait; the next call does not wait any more.
        """
        try:
            self._wait_for_last()
        except KeyboardInterrupt:
            with self._changed:
                self._last_error, self._given_up = "interrupted", True
                self._changed.notify_all()
            raise
        return {
            "url": self._remote.url,
            "uploaded": list(self.uploaded),
            "left_out": list(self.left_out),
            "failures": self._failures,
            "last_error": self._last_error,
        }

    def _wait_for_last(self) -> None:
        with self._changed:
            self._closing, self._moved = True, time.monotonic()
            self._changed.notify_all()
            if (self._working or self._waiting) and not self._given_up:
                url = self._remote.url
                log.info("waiting for the upload to %s; interrupt to leave it to the next --resume", url)
            while (self._working or self._waiting) and not self._given_up:
                self._changed.wait(0.2)
                if time.monotonic() - self._moved > self._times.stall:
                    self._last_error = f"nothing was transferred for {self._times.stall:g} s"
                    self._given_up = True
            self._changed.notify_all()
        shutil.rmtree(self._run / STAGE, ignore_errors=True)  # even of an upload that hangs: no other one reads it

    def _work(self) -> None:
        attempts, delay = 0, self._times.first_retry
        while True:
            with self._changed:
                while self._waiting is None and not (self._closing or self._given_up):
                    self._changed.wait()
                staged, self._waiting = self._waiting, None
                if staged is None or self._given_up:
                    self._runs = False
                    if staged is not None:
                        self._leave_out(staged)
                    return
                self._working, self._moved = True, time.monotonic()
            try:
                self._upload(staged)
                attempts, delay = 0, self._times.first_retry
                staged.discard()
            except LostLockError as error:
                staged.discard()
                with self._changed:
                    self._given_up = True
                self._warn(staged.step, error, "this run uploads nothing more")
            except Exception as error:  # noqa: BLE001 - network, rights, disks: each file system has its own errors
                self._warn(staged.step, error, "the run continues, and the upload is retried")
                attempts = attempts + 1 if self._closing else 0
                self._try_again(staged, delay, last=attempts >= self._times.last_attempts)
                delay = min(2 * delay, self._times.longest_retry)
            finally:
                with self._changed:
                    self._working = False
                    self._changed.notify_all()

    def _try_again(self, staged: Staged, delay: float, *, last: bool) -> None:
        """Wait, then queue the same checkpoint once more, unless there is a newer one."""
        with self._changed:
            if not self._closing:
                self._changed.wait_for(lambda: self._closing or self._waiting is not None, timeout=delay)
            elif not last:
                self._changed.wait_for(lambda: self._waiting is not None or self._given_up, timeout=delay)
                self._moved = time.monotonic()
            if self._waiting is not None or last or self._given_up:
                self._leave_out(staged)
            else:
                self._waiting = staged

    def _leave_out(self, staged: Staged) -> None:
        if not staged.published:
            self.left_out.append(staged.step)
            log.info("the upload of the checkpoint of step %d is skipped", staged.step)
        staged.discard()

    def _upload(self, staged: Staged) -> None:
        """Upload all files of a checkpoint, then its manifest; delete the oldest checkpoints beyond `keep`.

        Raises:
            LostLockError: Another program uses the remote folder.
        """
        self._require_lock()
        if not staged.published:
            self._publish(staged)
            staged.published = True
            self.uploaded.append(staged.step)
            log.info("the checkpoint of step %d was uploaded to %s", staged.step, self._remote.url)
        self.send_own_files()
        with self._told_of_refused_deletes():
            copies.withdraw(self._remote, *list(copies.copies(self._remote))[: -self._keep])

    def _publish(self, staged: Staged) -> None:
        staged.finish()
        files = staged.files()
        if not staged.prepared:  # files of failed uploads, and of a discarded continuation of the run
            self.remove_unfinished(staged.step)
            staged.prepared = True
        for name in files:
            if name not in staged.sent:
                self._remote.upload(staged.folder / name, f"checkpoints/{name}", self._pulse)
                staged.sent.add(name)
                self._pulse()
        copy = Copy(staged.step, files)
        self._known(copy.id)
        self._require_lock()
        copies.publish(self._remote, copy)

    def send_own_files(self) -> None:
        """Upload the run's current files, logs included, for people to read; a resume does not use them."""
        for path in own_files(self._run, self._database, left_out=("cache", "checkpoints", "serve")):
            try:
                self._remote.upload(path, path.relative_to(self._run).as_posix(), self._pulse)
            except FileNotFoundError:
                if path.exists():  # so the error was not caused by this file
                    raise

    def remove_unfinished(self, *steps: int) -> None:
        """Delete the files of unfinished uploads, and the checkpoints of these steps, if the store lets them go.

        Files without a manifest do not count, and an upload of the same step replaces files of the same name.
        """
        with self._told_of_refused_deletes():
            copies.remove_unfinished(self._remote, *steps)

    @contextmanager
    def _told_of_refused_deletes(self) -> Iterator[None]:
        """Log a warning, once, if the store does not let this user delete files."""
        try:
            yield
        except PermissionError as error:
            if not self._told_of_refusal:
                log.warning("old checkpoints stay in %s, which refuses to delete files: %s", self._remote.url, error)
            self._told_of_refusal = True

    def _require_lock(self) -> None:
        if not self._lock.is_ours():
            raise LostLockError(f"another program has taken over {self._remote.url}")

    def _pulse(self) -> None:
        self._moved = time.monotonic()

    def _warn(self, step: int, error: Exception, then: str) -> None:
        self._failures += 1
        self._last_error = f"{type(error).__name__}: {first_line(error)}"
        again = step == self._last_failed
        self._last_failed = step
        level = logging.DEBUG if again else logging.WARNING  # do not repeat the warning for each attempt
        log.log(level, "the checkpoint of step %d cannot be uploaded: %s; %s", step, self._last_error, then)
