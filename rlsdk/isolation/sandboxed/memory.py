"""Limit the total memory of all processes of a sandbox, from a process outside that can see them.

A cgroup would also do it, but few machines let a process create one; `/proc` exists everywhere.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import suppress

_EVERY = 0.02
"""Seconds between checks. Each process has its own limit, which bounds the total growth between two checks."""


def wait_within(child: int, most: int, proc: int) -> None:
    """Wait for a process to end, and kill its descendants when their total memory exceeds a limit.

    Args:
        child: Id of the process; its own memory does not count.
        most: Limit in bytes.
        proc: File descriptor of `/proc`, opened before the child hid it.
    """
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCHLD})  # required by `sigtimedwait`
    while not os.waitpid(child, os.WNOHANG)[0]:
        signal.sigtimedwait({signal.SIGCHLD}, _EVERY)
        processes = list(_descendants(proc, child))
        if all(sum(used(proc, process) for process in processes) > most for used in (_resident, _proportional)):
            for process in processes:
                with suppress(ProcessLookupError):
                    os.kill(process, signal.SIGKILL)


def _descendants(proc: int, process: int) -> Iterator[int]:
    for thread in _listed(proc, f"{process}/task"):
        for child in map(int, _text(proc, f"{process}/task/{thread}/children").split()):
            yield child
            yield from _descendants(proc, child)


def _resident(proc: int, process: int) -> int:
    """Return the memory used by a process in bytes; shared pages count in full for each process."""
    pages = _text(proc, f"{process}/statm").split()
    return int(pages[1]) * os.sysconf("SC_PAGE_SIZE") if pages else 0


def _proportional(proc: int, process: int) -> int:
    """Return the memory with shared pages divided among their processes, if the kernel reports this."""
    for line in _text(proc, f"{process}/smaps_rollup").splitlines():
        if line.startswith("Pss:"):
            return int(line.split()[1]) * 1024
    return _resident(proc, process)


def _listed(proc: int, path: str) -> list[str]:
    try:
        folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY, dir_fd=proc)
        try:
            return os.listdir(folder)
        finally:
            os.close(folder)
    except OSError:  # it ended meanwhile
        return []


def _text(proc: int, path: str) -> str:
    try:
        with open(os.open(path, os.O_RDONLY, dir_fd=proc), encoding="ascii") as opened:
            return opened.read()
    except OSError:  # it ended meanwhile, or its files may not be read
        return ""
