"""Run folders: recognise them, lock them for one program, and let `--overwrite` delete only what rlsdk created."""

from __future__ import annotations

import logging
import os
import re
import shutil
import socket
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from glob import escape
from pathlib import Path

from filelock import SoftFileLease, Timeout

from rlsdk.errors import ConfigError
from rlsdk.options import did_you_mean

log = logging.getLogger(__name__)
MARKER = ".rlsdk-run"
"""Marker file in every run's folder, without which `--overwrite` deletes nothing."""
_BEFORE = frozenset({"cache", "debug.json", "eval", "logs", "serve"})
"""Names that `rlsdk eval`, `rlsdk debug` and servers create in a run's folder, perhaps before the run."""
COMPILED = "cache"
"""Folder of programs that a run's actors compiled; no later start may use them."""
_DELETED = ".deleted-"
"""Part of the name of a folder that is being deleted, after the run's."""
_ASIDE = re.compile(r"\..+\.(\d{1,9})\.partial")
"""Name that `aside` gives to a file, with the id of the process."""
_ASIDE_SECONDS = 60.0
"""Age in seconds at which such a file is left over, even if its process may run on another machine."""
LEASE_SECONDS = 30.0
"""Seconds without an update after which the lock of a program on another machine counts as dead."""


@contextmanager
def naming(path: str | Path) -> Iterator[None]:
    """Add a file's path to errors of the operating system in the block, since writing to an open file reports none."""
    try:
        yield
    except OSError as error:
        error.filename = error.filename or str(path)
        raise


def aside(path: Path) -> Path:
    """Return where this process writes a file before it renames it; `remove_unfinished` deletes what it left there."""
    return path.with_name(f".{path.name}.{os.getpid()}.partial")


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield where to write a file, which is then renamed: if the disk is full, the previous file, or none, stays."""
    partial = aside(path)
    try:
        with naming(path):
            yield partial
            partial.replace(path)
    except BaseException:
        with suppress(OSError):
            partial.unlink()
        raise


def replace_text(path: Path, text: str, *, errors: str = "strict") -> None:
    """Write a file aside and rename it: if the disk is full or the process is killed, the previous file stays."""
    with replacing(path) as partial:
        partial.write_text(text, encoding="utf-8", errors=errors)


def write_output(path: Path, text: str) -> None:
    """Write a file that the user has named, which may be a link, a pipe or a device; otherwise as `replace_text`."""
    if path.is_symlink() or (path.exists() and not path.is_file()):
        with naming(path):
            path.write_text(text, encoding="utf-8", errors="replace")
    else:
        replace_text(path, text, errors="replace")


def remove_unfinished(folder: Path) -> None:
    """Delete what killed processes had written `aside`; what a living one writes there is left."""
    import psutil

    for path in folder.glob(".*.partial"):
        match = _ASIDE.fullmatch(path.name)
        if match is None or psutil.pid_exists(int(match[1])):
            continue
        with suppress(OSError):
            if time.time() - path.stat().st_mtime > _ASIDE_SECONDS:
                path.unlink()


class FolderLock:
    """A program's lock on a run's folder."""

    def __init__(self, folder: Path, path: Path, lease: SoftFileLease) -> None:
        self._folder, self._path, self._lease = folder, path, lease
        self._missed = False

    def loss(self) -> str:
        """Describe in a sentence how this program lost the lock; empty while it has it.

        A program that was stopped or disconnected for longer than `LEASE_SECONDS` may lose it to another machine's.
        """
        try:
            lines = self._path.read_text(encoding="utf-8").splitlines()
        except FileNotFoundError:
            lines = []
        except OSError:  # the disk does not answer
            return ""
        # The trainer reports a folder that is gone.
        ours = f"token={self._lease.token}" in lines or not self._folder.exists()
        missed, self._missed = self._missed, not ours
        if ours or not missed:  # a program that tries to take over renames the file for a moment
            return ""
        if not lines:
            return f"{self._path}, the lock of the run's folder, is gone, so another program may have trained into it"
        pid, host = _holder(self._path)
        return (
            f"process {pid} on {host} has taken over {self._folder}, since this program was stopped or disconnected "
            f"for more than {LEASE_SECONDS:.0f} s"
        )


@contextmanager
def held(folder: Path) -> Iterator[FolderLock]:
    """Lock a run's folder against other programs, on this machine or another one that shares the disk.

    The lock is a file next to the folder with the holder's pid and host, touched every few seconds. The lock of a dead
    process on this machine is taken over at once, another machine's after `LEASE_SECONDS` without a touch.

    Raises:
        ConfigError: Another program holds it.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    path = _lock_path(folder)
    lease = SoftFileLease(path, lease_duration=LEASE_SECONDS, thread_local=False)
    try:
        with naming(path):
            _acquire(lease, path)
    except Timeout as error:
        pid, host = _holder(path)
        raise ConfigError(
            [
                f"name: {folder} is in use by process {pid} on {host}, which trains into it; wait until it ends, "
                "end it, or choose another name=…"
            ]
        ) from error
    try:
        yield FolderLock(folder, path, lease)
    finally:
        # A disk that is now read-only, say, must not hide why the run ended; the lock of a dead process binds nobody.
        with suppress(OSError):
            lease.release()


def process_in(folder: Path) -> str:
    """Return the id of the process on this machine that holds a run's folder; empty if none does."""
    path = _lock_path(folder)
    if not path.exists():
        return ""
    lease = SoftFileLease(path, lease_duration=LEASE_SECONDS, thread_local=False)
    try:
        with naming(path):
            lease.acquire(timeout=0)
    except Timeout:
        pid, host = _holder(path)
        return pid if host == socket.gethostname() and not _is_zombie(pid) else ""
    lease.release()
    return ""


def _lock_path(folder: Path) -> Path:
    return folder.parent / f".{folder.name}.lock"


def _acquire(lease: SoftFileLease, path: Path) -> None:
    try:
        lease.acquire(timeout=0)
    except Timeout:
        pid, host = _holder(path)
        if host == socket.gethostname():
            if not _is_zombie(pid):
                raise
            lease.break_lock()
            lease.acquire(timeout=0)
            return
        log.warning(
            "process %s on %s holds this run; checking for %.0f s whether it is alive", pid, host, 1.5 * LEASE_SECONDS
        )
        lease.acquire(timeout=1.5 * LEASE_SECONDS)


def _is_zombie(pid: str) -> bool:
    """Return whether a process has ended and waits for its parent to collect its exit status."""
    import psutil

    try:
        return bool(psutil.Process(int(pid)).status() == psutil.STATUS_ZOMBIE)
    except (psutil.Error, ValueError):
        return False


def _holder(path: Path) -> tuple[str, str]:
    """Read pid and host from a lock file."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except FileNotFoundError:  # released meanwhile
        lines = []
    fields = dict(line.split("=", 1) for line in lines if "=" in line)
    return fields.get("pid", "?"), fields.get("host", "?")


def why_no_run(path: Path, missing: str) -> str:
    """Explain why a path given by a user is not a run's folder, and suggest the intended one."""
    if not path.exists():
        siblings = [each.name for each in path.parent.iterdir()] if path.parent.is_dir() else []
        return f"{path}: there is no such folder{did_you_mean(path, siblings)}"
    around = next((each for each in path.absolute().parents if (each / MARKER).is_file()), None)
    if around is not None:
        return f"{path} is inside the folder of a run; give that folder, {around}"
    if not path.is_dir():
        return f"{path} is a file; expected the folder of a run"
    held = sorted(str(each.parent) for each in path.glob(f"*/{MARKER}"))
    hint = f"; it holds folders of runs: {', '.join(held[:5])}{', …' if len(held) > 5 else ''}" if held else ""
    return f"{path} is not the folder of a run: it has no {missing}{hint}"


def mark(folder: Path) -> None:
    """Create a run's folder with its marker file."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / MARKER).touch()


def is_foreign(folder: Path) -> bool:
    """Return whether the path holds something that rlsdk did not create."""
    if not folder.exists() or (folder / MARKER).is_file():
        return False
    return not folder.is_dir() or any(each.name not in _BEFORE for each in folder.iterdir())


def remove_run(folder: Path) -> None:
    """Delete a run's folder, if it is one, so that an interrupted deletion does not leave half a run.

    Raises:
        ConfigError: The folder was not created by rlsdk.
    """
    foreign = is_foreign(folder)
    if not foreign and not (folder / MARKER).is_file():
        return
    if foreign or folder.is_symlink():
        raise ConfigError(
            [
                f"name: {folder} was not made by rlsdk (it has no file {MARKER}), so --overwrite does not "
                "delete it; delete it yourself, or choose another name=…"
            ]
        )
    remove_whole(folder)


def remove_whole(folder: Path) -> None:
    """Move a folder aside and delete it; `finish_removal` deletes what an interrupted call leaves."""
    aside = folder.parent / f".{folder.name}{_DELETED}{uuid.uuid4().hex[:8]}"
    folder.rename(aside)
    shutil.rmtree(aside)


def finish_removal(folder: Path) -> None:
    """Delete what `remove_whole` had moved aside when it was interrupted."""
    for aside in folder.parent.glob(f".{escape(folder.name)}{_DELETED}*"):
        shutil.rmtree(aside, ignore_errors=True)


def remove_compiled(folder: Path) -> None:
    """Delete compiled programs, so that actors run none from a folder that may come from another user."""
    compiled = folder / COMPILED
    if compiled.is_symlink():
        compiled.unlink()
    elif compiled.exists():
        shutil.rmtree(compiled)
