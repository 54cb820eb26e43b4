"""Linux system calls that confine a process, through libc, since Python 3.11 offers few of them.

All functions raise an `OSError` that begins with the name of the failed call.
"""

from __future__ import annotations

import ctypes
import errno
import os
import struct

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
    result: int = getattr(_libc, name)(*(ctypes.c_long(a) if isinstance(a, int) else a for a in arguments))
    if result == -1:
        number = ctypes.get_errno()
        raise OSError(number, f"{name}: {os.strerror(number)}")
    return result


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


_PR_SET_SECCOMP, _MODE_FILTER = 22, 2
_LOAD, _EQUAL, _AT_LEAST, _HAS_BITS, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_NUMBER, _ARCHITECTURE, _FIRST_ARGUMENT = 0, 4, 16
_ALLOWED, _REFUSED, _UNKNOWN = 0x7FFF0000, 0x00050000 | errno.EPERM, 0x00050000 | errno.ENOSYS
_X32 = 0x40000000
"""First call number of another ABI, which the table does not cover."""

_CLONE3 = 435
_NEW = (425, 426, 427, 438, 447)
"""io_uring (three calls), pidfd_getfd and memfd_secret, with the same numbers everywhere."""
# ptrace, process_vm_readv, process_vm_writev, kcmp; add_key, request_key, keyctl; bpf, perf_event_open, userfaultfd;
# name_to_handle_at, open_by_handle_at; unshare, setns; and shmget, semget, msgget, mq_open, memfd_create, whose memory
# no process limit counts
_TABLES = {
    "x86_64": (
        0xC000003E,
        41,
        56,
        (101, 310, 311, 312, 248, 249, 250, 321, 298, 323, 303, 304, 272, 308, 29, 64, 68, 240, 319),
    ),
    "aarch64": (
        0xC00000B7,
        198,
        220,
        (117, 270, 271, 272, 217, 218, 219, 280, 241, 282, 264, 265, 97, 268, 194, 190, 186, 180, 279),
    ),
}
"""Machine -> (its number in filters, numbers of the calls `socket` and `clone`, numbers of refused calls)."""
_FAMILIES = (1, 2, 10)
"""Unix, IPv4 and IPv6, which the network namespace confines, unlike vsock, which reaches a virtual machine's host."""

_Step = tuple[int, int, int, int]
"""(code, steps to skip if true, steps to skip if false, value)."""


def refuse_calls() -> None:
    """Refuse system calls that reach beyond namespaces or into parts of the kernel with past vulnerabilities.

    This is a second line of defence: without capabilities, and without nested user namespaces, most fail anyway.
    Architectures without a table here get no filter. Requires `no_new_privs`.
    """
    table = _TABLES.get(os.uname().machine)
    if table is None:
        return
    program = b"".join(struct.pack("HBBI", *step) for step in _steps(*table))
    text = ctypes.create_string_buffer(program, len(program))
    head = ctypes.create_string_buffer(struct.pack("@HP", len(program) // 8, ctypes.addressof(text)))
    call("prctl", _PR_SET_SECCOMP, _MODE_FILTER, ctypes.addressof(head), 0, 0)


def _steps(architecture: int, socket: int, clone: int, refused: tuple[int, ...]) -> list[_Step]:
    steps: list[_Step] = [
        (_LOAD, 0, 0, _ARCHITECTURE),
        (_EQUAL, 1, 0, architecture),
        _end(_REFUSED),
        (_LOAD, 0, 0, _NUMBER),
        (_AT_LEAST, 0, 1, _X32),
        _end(_REFUSED),
        # Its flags are in memory, where a filter cannot read them; without clone3, libc uses `clone`.
        (_EQUAL, 0, 1, _CLONE3),
        _end(_UNKNOWN),
    ]
    for number in (*refused, *_NEW):
        steps += [(_EQUAL, 0, 1, number), _end(_REFUSED)]
    steps += [
        (_EQUAL, 0, 4, clone),
        (_LOAD, 0, 0, _FIRST_ARGUMENT),
        (_HAS_BITS, 0, 1, NEWUSER),
        _end(_REFUSED),
        _end(_ALLOWED),
    ]
    families = [(_EQUAL, len(_FAMILIES) - i, 0, family) for i, family in enumerate(_FAMILIES)]
    return [
        *steps,
        (_EQUAL, 0, len(families) + 2, socket),
        (_LOAD, 0, 0, _FIRST_ARGUMENT),
        *families,
        _end(_REFUSED),
        _end(_ALLOWED),
    ]


def _end(value: int) -> _Step:
    return (_RETURN, 0, 0, value)
