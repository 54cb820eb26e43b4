"""The first process of the sandbox, which confines itself and then runs the tested code in child processes.

It reads a request from standard input and writes the outcome to standard output: `ready`, then a header and bytes for
each run, or `fault` and a sentence. Processes of the tested code do not have that output, and cannot inspect this one.
"""

from __future__ import annotations

import fcntl
import marshal
import os
import resource
import signal
import site
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any

from rlsdk.isolation.sandboxed import play
from rlsdk.isolation.sandboxed.border import LOST, Tested

if sys.platform == "linux":
    from rlsdk.isolation.sandboxed import confinement, kernel

_POLL = 0.002
_ERROR_BYTES = 2_000
"""Maximum bytes kept from the end of the tested code's standard error, which names the exception."""

_OURS = 3
"""Number of processes of the sandbox and of the tests, which count towards the tested code's limit."""

_HIGH = 64
"""First file descriptor that is safe to use for the sandbox's own files."""


def main() -> None:
    """Serve one request, then end this process and its forks.

    They skip the interpreter's shutdown, which touches every object and thus copies memory shared by forks.
    """
    with open(0, "rb", closefd=False) as stdin:
        request = marshal.load(stdin)  # from the process that started this one
    report = os.dup(1)
    try:
        (_isolated if request["isolated"] else _plain)(request, report)
    except OSError as error:
        _send(report, "fault", (error.strerror or str(error)).encode())
    except Exception:  # noqa: BLE001 - the caller must know about any failure
        import traceback

        _send(report, "fault", traceback.format_exc().encode())
    os._exit(0)


def _plain(request: dict[str, Any], report: int) -> None:
    if sys.platform == "linux":
        kernel.die_with_parent()
    if os.getppid() != request["parent"]:
        return
    os.chdir(request["folder"])
    _serve(request, report)


def _isolated(request: dict[str, Any], report: int) -> None:
    """Fork the first process of the new namespaces, which does the rest, and wait for it outside."""
    limits = request["limits"]
    was_root = confinement.leave()
    kernel.die_with_parent()
    if os.getppid() != request["parent"]:  # the parent ended before that call
        return
    outside, ours = os.pipe()
    proc = os.open("/proc", os.O_PATH)
    child = os.fork()
    if child:
        os.close(outside)
        os.close(report)
        os.close(1)
        confinement.wait_within(child, limits["memory_together"], proc)  # `ours` stays open until this process ends
        return
    os.close(ours)
    os.close(proc)
    if os.getpid() != 1:  # `_clear` would kill all processes of this user
        raise RuntimeError("the sandbox does not have its own process namespace")
    confinement.close(request["visible"], limits["disk"], was_root, outside)
    _serve(request, report)


def _serve(request: dict[str, Any], report: int) -> None:
    os.environ.clear()
    os.environ.update(HOME=os.getcwd(), TMPDIR=os.getcwd(), PATH="/usr/bin:/bin", LANG="C.UTF-8")
    sys.path += request["packages"]
    site.setquit()  # programs may call exit(), which an interpreter without site lacks
    _send(report, "ready")
    until = time.monotonic() + request["limits"]["timeout"]
    left = request["limits"]["output"]
    for run in request["runs"]:
        output, error = _file("output", b""), _file("error", b"")
        stdin = _file("input", run["input"])
        if run["steps"] is None:
            children = [_forked(request, [stdin, output, error], lambda: play.program(request["code"]))]
        else:
            children = _answer_and_tests(request, run, stdin, output, error)
        *answer, last = children
        status = _wait(last, until)
        if answer and status == LOST:  # the tests lost the answer, whose own exit status tells why
            status = _wait(answer[0], until)
        _clear(children, request["isolated"])
        written = os.fstat(output).st_size
        shown = os.pread(output, left, 0) if written <= left else b""
        end = os.pread(error, _ERROR_BYTES, max(os.fstat(error).st_size - _ERROR_BYTES, 0))
        fault = "time" if status is None else "output" if written > left else str(status)
        _send(report, f"run {fault} {len(end)}", end + shown)
        left -= len(shown)
        for each in (stdin, output, error):
            os.close(each)
        if status is None:
            break


def _answer_and_tests(request: dict[str, Any], run: dict[str, Any], given: int, output: int, error: int) -> list[int]:
    """Start the answer and the tests in separate processes; only the tests have the file for results."""
    asked, ask = os.pipe()
    replied, reply = os.pipe()
    nothing = os.open("/dev/null", os.O_RDWR)
    answer = _forked(
        request, [given, nothing, error, asked, reply], lambda: play.answer(request["code"], os.fdopen(3, "rb"), 4)
    )
    tests = _forked(
        request,
        [given, nothing, nothing, ask, replied, output],
        lambda: play.tests(run["steps"], run["names"], Tested(os.fdopen(3, "wb"), os.fdopen(4, "rb")), 5),
    )
    for each in (asked, ask, replied, reply, nothing):
        os.close(each)
    return [answer, tests]


def _forked(request: dict[str, Any], files: list[int], run: Callable[[], None]) -> int:
    """Start a confined process with `files` as its only file descriptors, from 0 on."""
    child = os.fork()
    if not child:
        play.to_its_end(lambda: _run(request, files, run))
    with suppress(ProcessLookupError):  # the child does it as well, but may have to be killed earlier
        os.setpgid(child, child)
    return child


def _run(request: dict[str, Any], files: list[int], run: Callable[[], None]) -> None:
    os.setpgid(0, 0)
    if sys.platform == "linux":
        kernel.die_with_parent()
    for target, source in enumerate([fcntl.fcntl(each, fcntl.F_DUPFD, _HIGH) for each in files]):
        os.dup2(source, target)
    os.closerange(len(files), 1 << 20)
    if request["isolated"]:
        kernel.refuse_calls()
    limits = request["limits"]
    chosen = {
        "CORE": 0,
        "CPU": limits["cpu"],
        "AS": limits["memory"],
        "DATA": limits["memory"],
        "FSIZE": limits["file"],
        "NOFILE": limits["files"],
    }
    if request["isolated"]:  # without a user namespace, all processes of this user would count
        chosen["NPROC"] = limits["processes"] + _OURS
    for name, most in chosen.items():
        kind = getattr(resource, f"RLIMIT_{name}")
        _, hard = resource.getrlimit(kind)
        most = most if hard == resource.RLIM_INFINITY else min(most, hard)
        resource.setrlimit(kind, (most, most))
    run()


def _file(name: str, content: bytes) -> int:
    """Return the descriptor of an anonymous file that holds `content`, positioned at its start."""
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
    """Return the exit status of a process, negative for a signal; None if it is still running at the deadline."""
    while True:
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status)
        if time.monotonic() > until:
            return None
        time.sleep(_POLL)


def _clear(children: list[int], isolated: bool) -> None:
    """Kill the remaining processes of a run: in a process namespace, all but this one."""
    for kill in [partial(os.kill, -1)] if isolated else [partial(os.killpg, child) for child in children]:
        with suppress(ProcessLookupError, PermissionError):  # none is left
            kill(signal.SIGKILL)
    try:
        while True:
            os.waitpid(-1, 0)
    except ChildProcessError:
        pass


def _send(report: int, head: str, content: bytes = b"") -> None:
    data = f"{head} {len(content)}\n".encode() + content
    while data:
        data = data[os.write(report, data) :]
