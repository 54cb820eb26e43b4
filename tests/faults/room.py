"""A mount namespace with its own small file systems, on which a disk can be full or read-only."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

NAMESPACE = ["unshare", "--map-root-user", "--mount"]


class Room:
    """A process that keeps the namespace, until it is closed."""

    def __init__(self, folder: Path, shm: str = "") -> None:
        """Open it.

        Args:
            folder: Gets a file system of its own, of 256 MiB.
            shm: Size of `/dev/shm`, as `mount` takes it; empty leaves it as it is.
        """
        script = f"mount -t tmpfs -o size=256m tmpfs '{folder}'"
        if shm:
            script += f" && mount -t tmpfs -o size={shm} tmpfs /dev/shm"
        command = [*NAMESPACE, "sh", "-c", f"{script} && echo ready && exec sleep 36000"]
        self._holder = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert self._holder.stdout is not None
        if self._holder.stdout.readline() != "ready\n":
            raise OSError("this kernel lets no user mount a file system")
        enter = ["nsenter", "--preserve-credentials", "-U", "-m", "-t", str(self._holder.pid)]
        self.enter = [*enter, f"--wd={Path.cwd()}"]
        """What stands before a command that is to run inside."""

    def seen(self, path: Path) -> Path:
        """Return where a path of the room is found from outside."""
        return Path(f"/proc/{self._holder.pid}/root{path}")

    def read_only(self, folder: Path) -> None:
        """Make a folder read-only; files that are open stay writable."""
        self._run(f"mount --bind '{folder}' '{folder}' && mount -o remount,bind,ro '{folder}'")

    def writable(self, folder: Path) -> None:
        """Make it writable again."""
        self._run(f"mount -o remount,bind,rw '{folder}'")

    def fill(self, folder: Path) -> Callable[[], object]:
        """Fill a file system; return a function that frees the space."""
        filler = self.seen(folder) / "filler"
        with filler.open("wb", buffering=0) as file:  # a buffer that cannot be written fails the end of the block
            for size in (1 << 20, 1 << 12, 1):
                with suppress(OSError):
                    while file.write(bytes(size)):
                        pass
        return filler.unlink

    def close(self) -> None:
        """Give its file systems back."""
        self._holder.kill()
        self._holder.communicate()

    def _run(self, command: str) -> None:
        subprocess.run([*self.enter, "sh", "-c", command], check=True, cwd=os.sep)


def available() -> bool:
    """Return whether this kernel lets a user mount file systems."""
    command = [*NAMESPACE, "mount", "-t", "tmpfs", "tmpfs", "/mnt"]
    return subprocess.run(command, capture_output=True, check=False).returncode == 0
