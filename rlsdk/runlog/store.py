"""The database of a run's rollouts, an SQLite file in its folder or PostgreSQL at a URL, and its writer thread."""

from __future__ import annotations

import asyncio
import errno
import json
import logging
import os
import queue
import shutil
import sqlite3
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Any

import attrs
import sqlalchemy as sa

from rlsdk.errors import EnvironmentFault, RunError, ValueFault, first_line
from rlsdk.runlog.folder import aside, replace_text
from rlsdk.runlog.serialization import decode
from rlsdk.runlog.tables import GROUPS, METADATA, ROLLOUTS, Entry, create_indices, group_row, rollout_rows
from rlsdk.types import Group, Task

log = logging.getLogger(__name__)
DATABASE, ADDRESS = "rollouts.db", "rollouts.json"
"""Files in a run's folder: the SQLite database, or the address of an external database."""
_LOCAL = "sqlite:///"
BUSY_SECONDS = 5.0
"""Seconds that SQLite waits for another writing process before a warning is logged."""
LOCK_SECONDS = 1800.0
"""Timeout in seconds for that process."""
_CHUNK = 500
"""Maximum number of rows in one statement, since databases limit its parameters."""
_NOTHING_LEFT = 2**20
"""Free bytes below which a disk counts as full."""
_CREATION_LOCK = 7_265_743_550_319_457_291
"""Key of PostgreSQL's advisory lock under which runs create the tables; any number that other programs do not use."""
_FULL = "53100"
"""PostgreSQL's error code for a full disk."""
_WAITING = 8
"""Maximum number of queued jobs, each about the groups of one step; `submit` waits while the queue is full."""


@attrs.frozen
class Address:
    """Address of a run's rollout database.

    Attributes:
        url: URL of the database, without a password.
        run: Id that distinguishes the run's rows from those of other runs.
        password_env: Name of the environment variable that holds the password.
    """

    url: str
    run: str = ""
    password_env: str | None = None

    @classmethod
    def of(cls, folder: Path) -> Address | None:
        """Return the address recorded in a run folder; None if the run keeps no rollouts."""
        if (folder / ADDRESS).is_file():
            return cls(**json.loads((folder / ADDRESS).read_text(encoding="utf-8")))
        return cls(f"{_LOCAL}{folder / DATABASE}") if (folder / DATABASE).is_file() else None

    @classmethod
    def make(cls, folder: Path, url: str | None, password_env: str | None) -> Address:
        """Create the address for a run folder, and record it there if the database is external."""
        if url is None:
            (folder / ADDRESS).unlink(missing_ok=True)
            return cls(f"{_LOCAL}{folder / DATABASE}")
        known = cls.of(folder)
        address = cls(url, known.run if known and known.run else f"{folder.name}-{uuid.uuid4().hex[:12]}", password_env)
        replace_text(folder / ADDRESS, json.dumps(attrs.asdict(address)) + "\n")
        return address

    @property
    def is_file(self) -> bool:
        """True if the database is an SQLite file."""
        return self.url.startswith(_LOCAL)

    @property
    def file(self) -> str:
        """Path of the SQLite file."""
        return self.url.removeprefix(_LOCAL)

    def engine(self, **how: Any) -> sa.Engine:
        """Create an SQLAlchemy engine for the database.

        Raises:
            EnvironmentFault: The package for PostgreSQL is not installed.
        """
        url = sa.URL.create("sqlite", database=self.file) if self.is_file else sa.make_url(self.url)
        if password := os.environ.get(self.password_env or ""):
            url = url.set(password=password)
        try:
            return sa.create_engine(url, hide_parameters=True, **how)
        except ModuleNotFoundError as error:
            raise EnvironmentFault(f"{self.url} needs psycopg: pip install 'rlsdk[postgres]' ({error})") from error

    def unreadable(self, error: sa.exc.DBAPIError) -> RunError:
        """Return the error to raise if the database cannot be read, from the error of SQLAlchemy."""
        return RunError(f"the rollouts in {self.url} cannot be read: {first_line(error.orig)}")


class RolloutStore:
    """Groups by the number of their task record; use it from one thread at a time, and change it in a `transaction`."""

    def __init__(self, address: Address) -> None:
        """Connect, and create the tables if they do not exist.

        Raises:
            RunError: The database cannot be reached, or the file is not a database.
        """
        self.address = address
        how = {"connect_args": {"check_same_thread": False, "timeout": BUSY_SECONDS}} if address.is_file else {}
        self._engine = address.engine(poolclass=sa.pool.StaticPool, **how)
        self._run = address.run
        with self._explained():
            if address.is_file and not Path(address.file).exists():
                self._create_file(Path(address.file))
            self._connection = self._engine.connect()
            if address.is_file:
                self._wait_for("PRAGMA journal_mode=WAL")  # readers never wait for the writer
                self._connection.exec_driver_sql("PRAGMA synchronous=NORMAL")
            else:  # PostgreSQL fails if two runs create a table at once
                self._connection.execute(sa.select(sa.func.pg_advisory_xact_lock(_CREATION_LOCK)))
            METADATA.create_all(self._connection)
            create_indices(self._connection)
            self._connection.commit()

    def _create_file(self, path: Path) -> None:
        """Create the file aside with its tables: a run that is ended meanwhile leaves no file that lacks them."""
        partial = aside(path)
        engine = attrs.evolve(self.address, url=f"{_LOCAL}{partial}").engine(poolclass=sa.pool.NullPool)
        try:
            with engine.begin() as connection:
                METADATA.create_all(connection)
            partial.replace(path)
        finally:
            engine.dispose()
            partial.unlink(missing_ok=True)

    def close(self) -> None:
        """Disconnect; a file of SQLite then stands alone, and reading it creates no others next to it."""
        if self.address.is_file:
            with suppress(sa.exc.DBAPIError):  # another process reads it, or the disk is full
                self._connection.rollback()
                self._connection.exec_driver_sql("PRAGMA journal_mode=DELETE")
        self._connection.close()
        self._engine.dispose()

    @contextmanager
    def transaction(self) -> Iterator[None]:
        """Context manager: apply all changes of the block, or none.

        Raises:
            RunError: The database reports an error; the message names the database, without a password.
            OSError: The disk is full.
        """
        with self._explained(), self._connection.begin():
            if self.address.is_file:
                self._wait_for("BEGIN IMMEDIATE")
            yield

    def _wait_for(self, statement: str) -> None:
        """Execute a statement that needs a lock; while another process has it, wait and log its name."""
        began, logged = time.monotonic(), False
        while True:
            try:
                self._connection.exec_driver_sql(statement)
            except sa.exc.OperationalError as error:
                busy = getattr(error.orig, "sqlite_errorcode", 0) & 0xFF == sqlite3.SQLITE_BUSY
                seconds = time.monotonic() - began
                if not busy or seconds >= LOCK_SECONDS:
                    raise
                if not logged:
                    who = lock_holder(Path(self.address.file)) or "another process"
                    log.warning(
                        "%s has been locked by %s for %.0f s; the run is waiting", self.address.file, who, seconds
                    )
                    logged = True
                continue
            if logged:
                log.warning("%s is free again, after %.0f s", self.address.file, time.monotonic() - began)
            return

    def put(self, entries: Sequence[Entry]) -> None:
        """Store groups; a group replaces a stored one with the same number."""
        if not entries:
            return
        keys = [{"r": self._run, "n": entry.number} for entry in entries]
        for table in (ROLLOUTS, GROUPS):
            same = (table.c.run == sa.bindparam("r")) & (table.c.number == sa.bindparam("n"))
            self._connection.execute(table.delete().where(same), keys)
        self._connection.execute(GROUPS.insert(), [group_row(self._run, entry) for entry in entries])
        rows = [row for entry in entries for row in rollout_rows(self._run, entry)]
        if rows:
            self._connection.execute(ROLLOUTS.insert(), rows)

    def settle(self, ends: Sequence[tuple[int, str, int | None, int]]) -> None:
        """Record the new state of stored groups: (number, state, step, uses) of each; unknown numbers are ignored."""
        if not ends:
            return
        same = (GROUPS.c.run == self._run) & (GROUPS.c.number == sa.bindparam("n"))
        change = GROUPS.update().where(same)
        change = change.values(state=sa.bindparam("state"), step=sa.bindparam("step"), uses=sa.bindparam("uses"))
        rows = [dict(zip(("n", "state", "step", "uses"), end, strict=True)) for end in ends]
        self._connection.execute(change, rows)

    def forget(self, checkpoint: int, every: int) -> None:
        """Delete groups that only checkpoints before the given one need.

        Args:
            checkpoint: Step of the oldest checkpoint that the run may be resumed from.
            every: Interval in steps; groups of every step that is a multiple of it are kept.
        """
        unwanted = GROUPS.c.kept_at.is_not(None) & (GROUPS.c.kept_at < checkpoint)
        passing = GROUPS.c.step.is_(None) | (GROUPS.c.step % every != 0)
        self._delete(unwanted & passing)

    def rewind(self, step: int, kept: Mapping[int, tuple[str, int | None, int]]) -> None:
        """Restore the state of a checkpoint, in one transaction: delete later rows, and reset the kept ones.

        Args:
            step: Step of the checkpoint; 0 for a new run.
            kept: Number -> state, step and uses at the checkpoint of each group that is kept.
        """
        later = GROUPS.c.step.is_(None) | (GROUPS.c.step > step)
        waiting = [number for number, (_, ended, _) in kept.items() if ended is None]
        with self.transaction():
            self.settle([(number, *then) for number, then in kept.items()])
            for part in chunks(waiting):  # marked in chunks, so that a single statement can delete all others
                same = (GROUPS.c.run == self._run) & GROUPS.c.number.in_(part)
                self._connection.execute(GROUPS.update().where(same).values(kept_at=-1))
            self._delete(later & (GROUPS.c.kept_at.is_(None) | (GROUPS.c.kept_at != -1)))
            back = (GROUPS.c.run == self._run) & (GROUPS.c.kept_at == -1)
            self._connection.execute(GROUPS.update().where(back).values(kept_at=step))

    def recall(self, tasks: Mapping[int, Task], step: int) -> dict[int, Group]:
        """Load the groups of these tasks, by number; missing or changed groups are left out and logged.

        Args:
            tasks: Tasks by group number.
            step: Step of the checkpoint; rollouts from later weights belong to a continuation that was discarded.
        """
        found: dict[int, Group] = {}
        for part in chunks(list(tasks)):
            same = (GROUPS.c.run == self._run) & GROUPS.c.number.in_(part) & (GROUPS.c.newest <= step)
            for number, payload in self._connection.execute(sa.select(GROUPS.c.number, GROUPS.c.payload).where(same)):
                try:
                    found[number] = decode(payload, tasks[number])
                except ValueFault as error:
                    log.warning("group %d cannot be restored and is sampled again: %s", number, error)
        self._connection.rollback()
        if lacking := len(tasks) - len(found):
            log.warning("%d groups of the checkpoint cannot be restored from %s", lacking, self.address.url)
        return found

    def _delete(self, which: sa.ColumnElement[bool]) -> None:
        rows = (GROUPS.c.run == self._run) & which
        numbers = sa.select(GROUPS.c.number).where(rows)
        self._connection.execute(ROLLOUTS.delete().where(ROLLOUTS.c.run == self._run, ROLLOUTS.c.number.in_(numbers)))
        self._connection.execute(GROUPS.delete().where(rows))

    @contextmanager
    def _explained(self) -> Iterator[None]:
        try:
            yield
        except sa.exc.DBAPIError as error:
            address, full = self.address, False
            if address.is_file:
                full = shutil.disk_usage(Path(address.file).parent).free < _NOTHING_LEFT
            if full or getattr(error.orig, "sqlstate", None) == _FULL or "disk is full" in str(error.orig):
                where = address.file if address.is_file else address.url
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), where) from error
            raise RunError(f"rollouts cannot be stored in {address.url}: {first_line(error.orig)}") from error


def lock_holder(file: Path) -> str:
    """Return the process that holds a database's write lock, from /proc/locks; empty if it is not found."""
    nodes = {path.stat().st_ino for path in (file, file.with_name(f"{file.name}-shm")) if path.exists()}
    try:
        locks = [line.split() for line in Path("/proc/locks").read_text(encoding="ascii").splitlines()]
        held = [each for each in locks if "->" not in each and each[3] == "WRITE"]
        process = next(
            int(e[4]) for e in held if int(e[5].split(":")[2]) in nodes and int(e[4]) not in (-1, os.getpid())
        )
        command = Path(f"/proc/{process}/cmdline").read_bytes().replace(bytes(1), b" ").decode(errors="replace").strip()
    except (OSError, StopIteration, IndexError, ValueError):
        return ""
    return f"process {process} ({command[:80]})"


def damage_of(file: Path) -> str:
    """Describe the damage to a database file; empty if it is intact, missing, or cannot be opened now."""
    if not file.is_file():
        return ""
    try:
        with closing(sqlite3.connect(file)) as connection:
            found: str = connection.execute("PRAGMA quick_check(1)").fetchone()[0]
    except sqlite3.DatabaseError as error:
        damaged = error.sqlite_errorcode & 0xFF in (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB)
        return str(error) if damaged else ""  # other errors are reported when the database is opened for writing
    return "" if found == "ok" else " ".join(found.split())


def set_aside(file: Path) -> Path:
    """Rename a database and SQLite's files next to it to unused names; return the new path."""
    names = ("damaged", *(f"damaged-{again}" for again in range(2, 1000)))
    aside = next(path for path in (file.with_name(f"{file.name}.{name}") for name in names) if not path.exists())
    for suffix in ("-wal", "-shm", ""):  # the database last, so that it is set aside again after a crash in between
        sidecar = file.with_name(file.name + suffix)
        if sidecar.exists():
            sidecar.rename(aside.with_name(aside.name + suffix))
    return aside


def chunks(numbers: Sequence[int]) -> Iterator[Sequence[int]]:
    """Split numbers into parts that a single statement may name."""
    return (numbers[i : i + _CHUNK] for i in range(0, len(numbers), _CHUNK))


Job = Callable[[RolloutStore], None]


class RolloutWriter:
    """Runs jobs on a store in order; jobs queued at the same time share a transaction.

    After a job has failed, the next call raises its exception, and further jobs are dropped.
    """

    def __init__(self, store: RolloutStore) -> None:
        """Start the thread; until `close`, no other thread may use the store."""
        self._store = store
        self._jobs: queue.Queue[Job | threading.Event | None] = queue.Queue(_WAITING)
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._work, name="rollouts", daemon=True)
        self._thread.start()

    async def submit(self, job: Job | threading.Event) -> None:
        """Queue a job; if the queue is full, wait without blocking the event loop."""
        self._check()
        try:
            self._jobs.put_nowait(job)
        except queue.Full:
            await asyncio.to_thread(self._jobs.put, job)

    async def flush(self) -> None:
        """Wait until all submitted jobs are in the database."""
        done = threading.Event()
        await self.submit(done)
        await asyncio.to_thread(done.wait)
        self._check()

    def close(self) -> None:
        """Wait for all jobs and end the thread."""
        self._jobs.put(None)
        self._thread.join()
        self._check()

    def _check(self) -> None:
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure

    def _work(self) -> None:
        failed, last = False, False
        while not last:
            waiting = self._take_waiting()
            last = None in waiting
            jobs = [job for job in waiting if callable(job)]
            try:
                if jobs and not failed:  # after a failure, jobs are dropped, so that no caller waits forever
                    with self._store.transaction():
                        for job in jobs:
                            job(self._store)
            except BaseException as error:  # noqa: BLE001 - raised by the next submit, flush or close
                self._failure, failed = error, True
            for flushed in waiting:
                if isinstance(flushed, threading.Event):
                    flushed.set()

    def _take_waiting(self) -> list[Job | threading.Event | None]:
        """Take all queued jobs, waiting for at least one."""
        jobs = [self._jobs.get()]
        while len(jobs) < _WAITING:
            try:
                jobs.append(self._jobs.get_nowait())
            except queue.Empty:
                break
        return jobs
