"""Folders of runs: which folders are some, one program at a time, and `--overwrite` only deletes what rlsdk made."""

from __future__ import annotations

import logging
import shutil
import socket
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import SoftFileLease, Timeout

from rlsdk.errors import ConfigError
from rlsdk.options import nearest

log = logging.getLogger(__name__)
MARKER = ".rlsdk-run"
"""A file in every run's folder, without which `--overwrite` deletes nothing."""
LEASE_SECONDS = 30.0
"""Time without a sign of life after which the lock of a program on another machine counts as dead."""


@contextmanager
def held(folder: Path) -> Iterator[None]:
    """Hold a run's folder against other programs, on this machine or another that shares the disk.

    The lock is a file beside the folder with the holder's pid and host, touched every few seconds. That of a dead
    process of this machine is taken at once, that of another machine when it has not been touched for `LEASE_SECONDS`.

    Args:
        folder: Folder of the run; it need not exist.

    Raises:
        ConfigError: Another program holds it.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    path = folder.parent / f".{folder.name}.lock"
    lease = SoftFileLease(path, lease_duration=LEASE_SECONDS, thread_local=False)
    try:
        _acquire(lease, path)
    except Timeout as error:
        pid, host = _holder(path)
        raise ConfigError(
            [
                f"name: {folder} is in use by process {pid} on {host}, which trains into it; wait until it has ended, "
                "end it, or choose another name=…"
            ]
        ) from error
    try:
        yield
    finally:
        lease.release()


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
    """Return whether a process has ended, and only waits for its parent to ask for its exit status."""
    import psutil

    try:
        return bool(psutil.Process(int(pid)).status() == psutil.STATUS_ZOMBIE)
    except (psutil.Error, ValueError):
        return False


def _holder(path: Path) -> tuple[str, str]:
    """Read pid and host out of a lock file."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except FileNotFoundError:  # released meanwhile
        lines = []
    fields = dict(line.split("=", 1) for line in lines if "=" in line)
    return fields.get("pid", "?"), fields.get("host", "?")


def why_no_run(path: Path, missing: str) -> str:
    """Say why a path that a user gave is not the folder of a run, and which folder may have been meant.

    Args:
        path: Path that was given.
        missing: File that the folder of a run would hold.
    """
    if not path.exists():
        near = nearest(path.name, (each.name for each in path.parent.iterdir())) if path.parent.is_dir() else None
        return f"{path}: there is no such folder{f'; did you mean {path.parent / near}?' if near else ''}"
    around = next((each for each in path.absolute().parents if (each / MARKER).is_file()), None)
    if around is not None:
        return f"{path} is inside the folder of a run; give that folder, {around}"
    if not path.is_dir():
        return f"{path} is a file; expected the folder of a run"
    held = sorted(str(each.parent) for each in path.glob(f"*/{MARKER}"))
    hint = f"; it holds folders of runs: {', '.join(held[:5])}{', …' if len(held) > 5 else ''}" if held else ""
    return f"{path} is not the folder of a run: it has no {missing}{hint}"


def mark(folder: Path) -> None:
    """Create a run's folder, with the file that distinguishes it from any other."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / MARKER).touch()


def is_foreign(folder: Path) -> bool:
    """Return whether something is there that rlsdk did not make."""
    return folder.exists() and not (folder / MARKER).is_file() and (not folder.is_dir() or any(folder.iterdir()))


def remove_run(folder: Path) -> None:
    """Delete a run's folder, moved aside first so that an interrupted deletion leaves no half of a run.

    Args:
        folder: Folder of the run; nothing happens if it is empty or does not exist.

    Raises:
        ConfigError: It holds something that rlsdk did not make.
    """
    if not folder.exists() or (folder.is_dir() and not any(folder.iterdir())):
        return
    if folder.is_symlink() or is_foreign(folder):
        raise ConfigError(
            [
                f"name: {folder} was not made by rlsdk (it has no file {MARKER}), so --overwrite does not "
                "delete it; delete it yourself, or choose another name=…"
            ]
        )
    aside = folder.parent / f".{folder.name}.deleted-{uuid.uuid4().hex[:8]}"
    folder.rename(aside)
    shutil.rmtree(aside)
