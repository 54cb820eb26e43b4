"""Linux system calls that confine a process, through libc, since Python 3.11 offers few of them.

All functions raise an `OSError` that begins with the name of the failed call.
"""

from __future__ import annotations

import ctypes
import os

NEWNS, NEWCGROUP, NEWUTS, NEWIPC = 0x00020000, 0x02000000, 0x04000000, 0x08000000
NEWUSER, NEWPID, NEWNET = 0x10000000, 0x20000000, 0x40000000

MS_NOSUID, MS_NODEV, MS_BIND, MS_REC, MS_PRIVATE = 0x2, 0x4, 0x1000, 0x4000, 0x40000
_MNT_DETACH = 2

_SYS_MOUNT_SETATTR = 442
"""Number of a call added in Linux 5.12; calls added after 5.1 have the same number on every architecture."""
_AT_FDCWD, _AT_RECURSIVE = -100, 0x8000
_READ_ONLY, _NOSUID = 0x1, 0x2

_PR_SET_PDEATHSIG, _PR_SET_DUMPABLE, _PR_CAPBSET_DROP, _PR_SET_NO_NEW_PRIVS = 1, 4, 24, 38
_CAPABILITY_VERSION = 0x20080522
_SIGKILL = 9

_libc = ctypes.CDLL(None, use_errno=True)


def call(name: str, *arguments: int | bytes | None) -> int:
    """Call a function of libc; integers are passed as `long`.

    Raises:
        OSError: The call returned -1.
    """
    found: int = getattr(_libc, name)(*(ctypes.c_long(a) if isinstance(a, int) else a for a in arguments))
    if found == -1:
        number = ctypes.get_errno()
        raise OSError(number, f"{name}: {os.strerror(number)}")
    return found


def unshare(flags: int) -> None:
    """Move this process into new namespaces."""
    call("unshare", flags)


def mount(source: str, target: str, kind: str | None = None, flags: int = 0, options: str | None = None) -> None:
    """Mount a file system."""
    try:
        call("mount", source.encode(), target.encode(), _bytes(kind), flags, _bytes(options))
    except OSError as error:
        raise OSError(error.errno, f"mount of {source} at {target}: {os.strerror(error.errno or 0)}") from None


def _bytes(text: str | None) -> bytes | None:
    return None if text is None else text.encode()


def read_only(target: str) -> None:
    """Make a mount and all mounts below it read-only, and disable set-user-id programs."""
    attributes = (ctypes.c_uint64 * 4)(_READ_ONLY | _NOSUID, 0, 0, 0)
    pointer = ctypes.addressof(attributes)
    try:
        call(
            "syscall", _SYS_MOUNT_SETATTR, _AT_FDCWD, target.encode(), _AT_RECURSIVE, pointer, ctypes.sizeof(attributes)
        )
    except OSError as error:
        raise OSError(error.errno, f"mount_setattr (Linux 5.12): {os.strerror(error.errno or 0)}") from None


def enter_root(folder: str) -> None:
    """Make a mounted folder the root, and unmount the old one."""
    os.chdir(folder)
    call("pivot_root", b".", b".")
    call("umount2", b".", _MNT_DETACH)
    os.chdir("/")


def die_with_parent() -> None:
    """Make the kernel kill this process when its parent ends; a change of user or capabilities resets this."""
    call("prctl", _PR_SET_PDEATHSIG, _SIGKILL, 0, 0, 0)


def set_dumpable(dumpable: bool) -> None:
    """Set whether processes of the same user may inspect this one and own its files in /proc."""
    call("prctl", _PR_SET_DUMPABLE, int(dumpable), 0, 0, 0)


def drop_capabilities() -> None:
    """Drop all capabilities, and the ability to gain new ones."""
    for capability in range(64):
        try:
            call("prctl", _PR_CAPBSET_DROP, capability, 0, 0, 0)
        except OSError:
            if capability < 32:  # the kernel rejects numbers beyond its last capability
                raise
            break
    header = (ctypes.c_uint32 * 2)(_CAPABILITY_VERSION, 0)
    nothing = (ctypes.c_uint32 * 6)()
    call("capset", ctypes.addressof(header), ctypes.addressof(nothing))
    call("prctl", _PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
