"""Filter system calls that reach beyond namespaces or into parts of the kernel with past vulnerabilities.

This is a second line of defence: without capabilities, and without nested user namespaces, most fail anyway.
Architectures without a table here get no filter.
"""

from __future__ import annotations

import ctypes
import errno
import os
import struct

from rlsdk.isolation.sandboxed import kernel

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
    """Install the filter, which requires `no_new_privs`."""
    table = _TABLES.get(os.uname().machine)
    if table is None:
        return
    program = b"".join(struct.pack("HBBI", *step) for step in _steps(*table))
    text = ctypes.create_string_buffer(program, len(program))
    head = ctypes.create_string_buffer(struct.pack("@HP", len(program) // 8, ctypes.addressof(text)))
    kernel.call("prctl", _PR_SET_SECCOMP, _MODE_FILTER, ctypes.addressof(head), 0, 0)


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
        (_HAS_BITS, 0, 1, kernel.NEWUSER),
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
