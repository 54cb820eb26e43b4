"""Python stacks of a process, which it writes to its standard error when another process asks.

A signal handler of `faulthandler` would read the frames of running threads, and crash a process whose threads call
functions meanwhile. So a thread of the process writes the stacks: it holds Python's lock, and nothing runs.
"""

from __future__ import annotations

import faulthandler
import os
import signal
import socket
import threading
from contextlib import suppress
from hashlib import sha256

ANSWER_SECONDS = 2.0
"""Seconds until a process that has not answered is assumed to keep Python's lock in code that is not Python."""
_SIGNAL = getattr(signal, "SIGUSR2", None)
_ANSWERING: set[int] = set()
"""Id of this process if its thread answers: a fork inherits its parent's, but no thread."""


def offer_stacks(machine: str) -> bool:
    """Make this process write its stacks to standard error for `request_stacks`; return False if it cannot.

    Args:
        machine: Id of what this process sees of its machine.
    """
    if os.getpid() in _ANSWERING:
        return True
    if _SIGNAL is None:
        return False
    inbox = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    try:
        inbox.bind(_address(machine, os.getpid()))
    except OSError:  # there are no abstract sockets outside Linux
        inbox.close()
        return False
    faulthandler.register(_SIGNAL, file=2, all_threads=True, chain=False)
    threading.Thread(target=_answer, args=(inbox,), name="stacks", daemon=True).start()
    _ANSWERING.add(os.getpid())
    return True


def request_stacks(machine: str, pid: int) -> None:
    """Make a process on this machine write its stacks; it has called `offer_stacks`."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as outbox:
        outbox.bind("")  # any free address
        outbox.settimeout(ANSWER_SECONDS)
        try:
            outbox.sendto(b"stacks", _address(machine, pid))
            outbox.recv(16)
        except OSError:
            # Code that is not Python keeps the lock. No frame changes then, so the signal is safe.
            if _SIGNAL is not None:
                with suppress(ProcessLookupError):
                    os.kill(pid, _SIGNAL)


def _address(machine: str, pid: int) -> str:
    return f"\0rlsdk-stacks-{sha256(machine.encode()).hexdigest()[:16]}-{pid}"


def _answer(inbox: socket.socket) -> None:
    while True:
        _, sender = inbox.recvfrom(16)
        faulthandler.dump_traceback(file=2, all_threads=True)
        with suppress(OSError):  # the other process no longer waits
            inbox.sendto(b"written", sender)
