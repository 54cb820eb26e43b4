"""The first process of the sandbox: builds the walls, then runs the tested code in processes of their own.

It reads a request from its standard input and writes what came of it to its standard output: `ready`, then a header and
bytes for each run, or `fault` and a sentence. No process of the tested code has that output, or may look into this one.
"""

from __future__ import annotations

import marshal
import os
import resource
import signal
import site
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any

from rlsdk.scoring.jail import play

if sys.platform == "linux":
    from rlsdk.scoring.jail import kernel, walls

_POLL = 0.002
_ERROR_BYTES = 2_000
"""That are kept of what the tested code wrote to its standard error: the end, which names the exception."""

_RESULTS = 3
"""Where the tested code's process has the file for its results."""

_OURS = 2
"""Processes of the sandbox itself, which count as the tested code's."""


def main() -> None:
    """Serve one request, and end this process and those it forked.

    None of them takes down its interpreter: that touches every object, and so copies the memory that forks share.
    """
    request = _read()
    report = os.dup(1)
    try:
        (_isolated if request["isolated"] else _plain)(request, report)
    except OSError as error:
        _send(report, "fault", (error.strerror or str(error)).encode())
    except Exception:  # noqa: BLE001 - whatever it is, the caller has to know
        import traceback

        _send(report, "fault", traceback.format_exc().encode())
    os._exit(0)


def _read() -> dict[str, Any]:
    parts = []
    while part := os.read(0, 1 << 20):
        parts.append(part)
    found: dict[str, Any] = marshal.loads(b"".join(parts))  # from the process that started this one
    return found


def _plain(request: dict[str, Any], report: int) -> None:
    if sys.platform == "linux":
        kernel.die_with_parent()
    if os.getppid() != request["parent"]:
        return
    os.chdir(request["folder"])
    _serve(request, report)


def _isolated(request: dict[str, Any], report: int) -> None:
    """Fork the first process of the new namespaces, which does the rest; wait for it outside."""
    limits = request["limits"]
    was_root = walls.leave()
    kernel.die_with_parent()
    if os.getppid() != request["parent"]:  # it ended before that call
        return
    outside, held = os.pipe()
    child = os.fork()
    if child:
        os.close(outside)
        os.close(report)
        os.close(1)
        os.waitpid(child, 0)  # `held` stays open until this process ends
        return
    os.close(held)
    if os.getpid() != 1:  # `_clear` would kill whatever this user runs
        raise RuntimeError("the sandbox has no namespace of processes")
    walls.close(request["visible"], limits["disk"], was_root, outside)
    _serve(request, report)


def _serve(request: dict[str, Any], report: int) -> None:
    os.environ.clear()
    os.environ.update(HOME=os.getcwd(), TMPDIR=os.getcwd(), PATH="/usr/bin:/bin", LANG="C.UTF-8")
    sys.path += request["packages"]
    site.setquit()  # programs end with exit(), too, which an interpreter without site lacks
    _send(report, "ready")
    until = time.monotonic() + request["limits"]["timeout"]
    left = request["limits"]["output"]
    for run in request["runs"]:
        output, error = _file("output", b""), _file("error", b"")
        given = _file("input", run["input"])
        child = os.fork()
        if not child:
            play.to_its_end(_prepared(request, run, given, output, error))
        status = _wait(child, until)
        if status is None:
            os.kill(child, signal.SIGKILL)
        _clear(child, request["isolated"])
        written = os.fstat(output).st_size
        shown = os.pread(output, left, 0) if written <= left else b""
        end = os.pread(error, _ERROR_BYTES, max(os.fstat(error).st_size - _ERROR_BYTES, 0))
        fault = "time" if status is None else "output" if written > left else str(status)
        _send(report, f"run {fault} {len(end)}", end + shown)
        left -= len(shown)
        for each in (given, output, error):
            os.close(each)
        if status is None:
            break


def _prepared(request: dict[str, Any], run: dict[str, Any], given: int, output: int, error: int) -> Callable[[], None]:
    """Make this process, a new child, the tested code's; returns what it is to run."""
    os.setpgid(0, 0)
    if sys.platform == "linux":
        kernel.die_with_parent()
    for source, target in ((given, 0), (output, 1), (error, 2), (output, _RESULTS)):
        os.dup2(source, target)
    os.closerange(_RESULTS + 1, 1 << 20)
    _limit(request["limits"], request["isolated"])
    todo = run["steps"]
    if todo is None:
        os.close(_RESULTS)
        return partial(play.program, request["code"])
    nothing = os.open("/dev/null", os.O_RDWR)
    os.dup2(nothing, 1)
    os.close(nothing)
    return partial(play.steps, request["code"], todo, run["token"], _RESULTS)


def _limit(limits: dict[str, Any], isolated: bool) -> None:
    chosen = {
        "CORE": 0,
        "CPU": limits["cpu"],
        "AS": limits["memory"],
        "DATA": limits["memory"],
        "FSIZE": limits["file"],
        "NOFILE": limits["files"],
    }
    if isolated:  # elsewhere the processes of everything that this user runs would count
        chosen["NPROC"] = limits["processes"] + _OURS
    for name, most in chosen.items():
        kind = getattr(resource, f"RLIMIT_{name}")
        _, hard = resource.getrlimit(kind)
        most = most if hard == resource.RLIM_INFINITY else min(most, hard)
        resource.setrlimit(kind, (most, most))


def _file(name: str, content: bytes) -> int:
    """A file without a name that holds `content`, read from the start."""
    if hasattr(os, "memfd_create"):
        opened = os.memfd_create(name)
    else:
        import tempfile

        with tempfile.TemporaryFile() as file:
            opened = os.dup(file.fileno())
    while content:
        content = content[os.write(opened, content) :]
    os.lseek(opened, 0, os.SEEK_SET)
    return opened


def _wait(child: int, until: float) -> int | None:
    """How a process ended, a signal as a negative number; None if it has not by then."""
    while True:
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status)
        if time.monotonic() > until:
            return None
        time.sleep(_POLL)


def _clear(child: int, isolated: bool) -> None:
    """Kill what is left of a run. In a namespace of processes that is everything but this one."""
    try:
        if isolated:
            os.kill(-1, signal.SIGKILL)
        else:
            os.killpg(child, signal.SIGKILL)
    except (ProcessLookupError, PermissionError):  # none is left
        pass
    try:
        while True:
            os.waitpid(-1, 0)
    except ChildProcessError:
        pass


def _send(report: int, head: str, content: bytes = b"") -> None:
    data = f"{head} {len(content)}\n".encode() + content
    while data:
        data = data[os.write(report, data) :]
