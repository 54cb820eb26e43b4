"""Confine the sandbox: separate namespaces and file system, no privileges, resource limits."""

from __future__ import annotations

import os
import select
import signal
from collections.abc import Iterator
from contextlib import suppress

from rlsdk.isolation.sandboxed import kernel

_NAMESPACES = kernel.NEWNS | kernel.NEWPID | kernel.NEWNET | kernel.NEWIPC | kernel.NEWUTS | kernel.NEWCGROUP
_NOBODY = 65534
_DEVICES = ("null", "zero", "random", "urandom")
_BASE = "/tmp"
"""Folder where the new root is built; every Linux has it, and mounts still see its content."""

WORK = "/sandbox"
"""The only writable folder."""


def leave() -> bool:
    """Move this process to new namespaces; its future forks get a new process namespace.

    Returns:
        True if it had root privileges, and so needed no user namespace.
    """
    user, group = os.geteuid(), os.getegid()
    if user == 0 and _can_be_nobody():
        try:
            kernel.unshare(_NAMESPACES)
        except PermissionError:  # root in a container, without root privileges
            pass
        else:
            return True
    kernel.unshare(_NAMESPACES | kernel.NEWUSER)
    self = os.open("/proc/self", os.O_PATH)
    _map_ids(self, user, group)
    os.close(self)
    return False


def close(visible: list[str], disk: int, was_root: bool, outside: int) -> None:
    """Confine this process, the first of its namespace, and its future children.

    Args:
        visible: Readable folders and files.
        disk: Size of `WORK` in bytes.
        was_root: Result of `leave`.
        outside: A pipe whose other end the parent holds; it is closed when the parent is gone.
    """
    self = os.open("/proc/self", os.O_PATH)
    kernel.mount("none", "/", None, kernel.MS_REC | kernel.MS_PRIVATE)
    _build(visible)
    kernel.enter_root(_BASE)
    kernel.read_only("/")
    kernel.mount("tmpfs", WORK, "tmpfs", kernel.MS_NOSUID | kernel.MS_NODEV, f"size={disk},nr_inodes=4096,mode=1777")
    os.chdir(WORK)
    if was_root:
        # In a user namespace of its own, so that only the sandbox's processes count towards nobody's limit.
        os.setgroups([])
        os.setresgid(_NOBODY, _NOBODY, _NOBODY)
        os.setresuid(_NOBODY, _NOBODY, _NOBODY)
        kernel.set_dumpable(True)  # otherwise root owns the id maps
        kernel.unshare(kernel.NEWUSER)
        _map_ids(self, _NOBODY, _NOBODY)
    os.close(self)
    kernel.drop_capabilities()
    kernel.set_dumpable(False)
    die_with_parent(outside)


def die_with_parent(outside: int) -> None:
    """Make the kernel kill this process when its parent ends; exit now if the parent has already ended.

    Args:
        outside: A pipe whose other end only the parent holds, and never writes to.
    """
    kernel.die_with_parent()
    if select.select([outside], [], [], 0)[0]:
        os._exit(1)


def _can_be_nobody() -> bool:
    """Return True if this user namespace maps the user nobody; it may map only a few users."""
    with open("/proc/self/uid_map", encoding="ascii") as opened:
        ranges = [tuple(map(int, line.split())) for line in opened]
    with open("/proc/self/setgroups", encoding="ascii") as opened:
        allowed = opened.read().strip() == "allow"
    return allowed and any(first <= _NOBODY < first + count for first, _, count in ranges)


def _map_ids(self: int, user: int, group: int) -> None:
    _write(self, "setgroups", "deny")
    _write(self, "uid_map", f"{user} {user} 1")
    _write(self, "gid_map", f"{group} {group} 1")


def _write(folder: int, name: str, text: str) -> None:
    try:
        opened = os.open(name, os.O_WRONLY, dir_fd=folder)
        try:
            os.write(opened, text.encode())
        finally:
            os.close(opened)
    except OSError as error:
        raise OSError(error.errno, f"{name} of a user namespace: {os.strerror(error.errno or 0)}") from None


def _build(visible: list[str]) -> None:
    """Assemble the sandbox's root file system in `_BASE`."""
    # Opened first, since the new root hides the content of _BASE; this also follows links, so they need no target here.
    sources = [(path, os.open(path, os.O_PATH)) for path in (*visible, *(f"/dev/{name}" for name in _DEVICES))]
    kernel.mount("tmpfs", _BASE, "tmpfs", kernel.MS_NOSUID | kernel.MS_NODEV, "size=1m,mode=755")
    os.makedirs(_BASE + WORK)
    os.makedirs(f"{_BASE}/dev")
    os.symlink(WORK, f"{_BASE}/dev/shm")
    for path, source in sources:
        opened, target = f"/proc/self/fd/{source}", _BASE + path
        if os.path.isdir(opened):
            os.makedirs(target, exist_ok=True)
        else:
            os.makedirs(os.path.dirname(target), exist_ok=True)
            os.close(os.open(target, os.O_CREAT | os.O_WRONLY))
        kernel.mount(opened, target, None, kernel.MS_BIND | kernel.MS_REC)
        os.close(source)


_EVERY = 0.02
"""Seconds between checks. Each process has its own limit, which bounds the total growth between two checks."""


def wait_within(child: int, most: int, proc: int) -> None:
    """Wait for a process to end, and kill its descendants when their total memory exceeds a limit.

    A cgroup would also do it, but few machines let a process create one; `/proc` exists everywhere.

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
