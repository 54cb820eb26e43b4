"""Activity of processes: what the operating system reports, and the Python stacks that a process writes on request."""

from __future__ import annotations

import faulthandler
import os
import platform
import signal
import socket
import sys
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import cache
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import attrs

if TYPE_CHECKING:
    import psutil

State = Literal["running", "disk", "stopped", "zombie", "gone", "unknown"]
CLOCK_SECONDS = 2.0
"""Tolerance for a process's starting time between two observers, where it depends on the clock."""
ANSWER_SECONDS = 2.0
"""Seconds until a process that has not answered is assumed to keep Python's lock in code that is not Python."""
_SIGNAL = getattr(signal, "SIGUSR2", None)
_ANSWERING: set[int] = set()
"""Id of this process if its thread answers: a fork inherits its parent's, but no thread."""


@attrs.frozen
class Identity:
    """A process on any machine.

    Attributes:
        pid: Process id.
        started: Starting time, in seconds since the machine was booted (on macOS, since 1970), which distinguishes it
            from a later process with the same id.
        host: Name of its machine.
        machine: Equal for two processes if they see each other's process ids.
        node: Ray's id of its node; empty for the driver.
        stacks: True if it writes its stacks on request; see `offer_stacks`.
    """

    pid: int
    started: float
    host: str
    machine: str
    node: str = ""
    stacks: bool = False


@attrs.frozen
class Vitals:
    """Observed state and activity of a process.

    Attributes:
        state: Running, waiting for a disk, stopped or ended.
        cpu: CPU seconds so far, child processes included.
        moved: Bytes read from and written to disks so far, child processes included.
        stopped: Id of a stopped child process; 0 if there is none.
        memory: Resident memory of the process itself, in bytes; ignored in comparisons, since it always changes.
    """

    state: State
    cpu: float = 0.0
    moved: int = 0
    stopped: int = 0
    memory: int = attrs.field(default=0, eq=False)


@cache
def machine() -> str:
    """Return an id of the machine or container whose process ids this process sees."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return platform.node()


def identity(node: str = "") -> Identity:
    """Return the identity of this process, and make it write its stacks to standard error on request."""
    return identify(os.getpid(), node=node, stacks=offer_stacks(machine()))


def identify(pid: int, *, node: str = "", stacks: bool = False) -> Identity:
    """Return the identity of a process on this machine."""
    import psutil

    return Identity(pid, _started(psutil.Process(pid)), platform.node(), machine(), node, stacks)


def look(processes: Sequence[Identity], *, measured: bool = True) -> list[Vitals]:
    """Return the vitals of processes on this machine, in order.

    Args:
        processes: Processes to look at.
        measured: False to return only the states of the processes themselves, which is cheap.
    """
    import psutil  # imported here, since `rlsdk explain` imports this module without the extra `train`

    children: dict[int, list[psutil.Process]] = {}
    for each in psutil.process_iter() if measured else ():
        with suppress(psutil.Error):
            children.setdefault(each.ppid(), []).append(each)
    return [_look(process, children, measured=measured) for process in processes]


def _look(process: Identity, children: Mapping[int, list[psutil.Process]], *, measured: bool) -> Vitals:
    import psutil

    try:
        top = psutil.Process(process.pid)
        if abs(_started(top) - process.started) > CLOCK_SECONDS:
            return Vitals("gone")
        state = _state(top)
        memory = 0 if state == "zombie" else int(top.memory_info().rss)
        if state in ("zombie", "stopped") or not measured:
            return Vitals(state, memory=memory)
        cpu, moved, stopped, below = _spent(top), _moved(top), 0, list(children.get(process.pid, ()))
        while below:
            each = below.pop()
            below += children.get(each.pid, ())
            with suppress(psutil.Error):
                cpu, moved, its = cpu + _spent(each), moved + _moved(each), _state(each)
                stopped = stopped or (each.pid if its == "stopped" else 0)
                state = "disk" if its == "disk" else state
        return Vitals(state, cpu, moved, stopped, memory)
    except psutil.NoSuchProcess:
        return Vitals("gone")
    except psutil.Error:
        return Vitals("unknown")


def _started(process: psutil.Process) -> float:
    # Not `create_time`, which counts from 1970 and so changes for all running processes when the clock is set.
    try:
        fields = Path(f"/proc/{process.pid}/stat").read_text(encoding="ascii", errors="replace").rpartition(")")[2]
    except OSError:
        return float(process.create_time())
    return int(fields.split()[19]) / os.sysconf("SC_CLK_TCK")


def _state(process: psutil.Process) -> State:
    import psutil

    states: dict[str, State] = {
        psutil.STATUS_STOPPED: "stopped",
        psutil.STATUS_TRACING_STOP: "stopped",
        psutil.STATUS_ZOMBIE: "zombie",
        psutil.STATUS_DEAD: "zombie",
        psutil.STATUS_DISK_SLEEP: "disk",
    }
    return states.get(process.status(), "running")


def _spent(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


def _moved(process: psutil.Process) -> int:
    counted = getattr(process, "io_counters", None)
    if counted is None:  # macOS
        return 0
    counters = counted()
    return int(counters.read_bytes + counters.write_bytes)


def peak_memory() -> int:
    """Return the peak main memory of this process in bytes."""
    import resource  # not on Windows

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return int(peak) if sys.platform == "darwin" else int(peak) * 1024


def write_stacks(process: Identity) -> bool:
    """Make a process on this machine write its stacks to its log; return False if it cannot."""
    if not process.stacks or look([process], measured=False)[0].state not in ("running", "disk"):
        return False
    request_stacks(process.machine, process.pid)
    return True


def kill(process: Identity) -> None:
    """Kill a process on this machine, even a stopped one; does nothing if it has ended."""
    if look([process], measured=False)[0].state != "gone":
        with suppress(ProcessLookupError):
            os.kill(process.pid, signal.SIGKILL)


def offer_stacks(machine: str) -> bool:
    """Make this process write its stacks to standard error for `request_stacks`; return False if it cannot.

    A signal handler of `faulthandler` would read the frames of running threads, and crash a process whose threads call
    functions meanwhile. So a thread of the process writes the stacks: it holds Python's lock, and nothing runs.

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
