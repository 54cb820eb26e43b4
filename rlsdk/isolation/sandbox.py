"""Run code that a model wrote, in isolated processes that do not outlive the call.

With `namespaces` (Linux), the code has no network, no privileges and no environment variables. It sees only Python's
standard library and system libraries, can write only to one folder in memory, and shares no processes, memory or names
with the rest of the machine. All its processes die with the first one of its namespace, which dies with its caller.
With `none`, there are only limits per process, an empty environment and a temporary folder: the code can do whatever
you can.
"""

from __future__ import annotations

import contextlib
import functools
import marshal
import os
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import attrs

from rlsdk.errors import EnvironmentFault, ValueFault
from rlsdk.isolation.sandboxed.play import Step

Isolation = Literal["namespaces", "none"]

_MIB = 2**20
_GRACE = 2.0
"""Seconds beyond its time limit for the sandbox to start and to end by itself."""

_SYSTEM = ("/lib", "/lib64", "/usr/lib", "/usr/lib64", "/etc/ld.so.cache", "/usr/share/zoneinfo")
"""System files that Python's own modules load: libraries and time zones."""

_PACKAGE = Path(__file__).resolve().parents[1]
_BOOT = """
import sys, types
stub = types.ModuleType("rlsdk")
stub.__path__ = [sys.argv.pop()]
sys.modules["rlsdk"] = stub
from rlsdk.isolation.sandboxed.main import main
main()
"""
"""Imports the launcher without running `rlsdk/__init__.py`."""


@attrs.frozen(kw_only=True)
class SandboxLimits:
    """Resource limits of tested code.

    Attributes:
        cpu: CPU seconds per process.
        memory: MiB of address space per process.
        memory_together: MiB that all processes together may use at any time; only under isolation.
        processes: Concurrent processes and threads; only under isolation, and not for root without CAP_SYS_ADMIN.
        files: Open files per process.
        disk: Total MiB of files in its folder; only under isolation.
        file: MiB per file.
        output: MiB of standard output over all runs.
    """

    cpu: int = 6
    memory: int = 1024
    memory_together: int = 2048
    processes: int = 16
    files: int = 64
    disk: int = 64
    file: int = 16
    output: int = 4

    def __attrs_post_init__(self) -> None:
        low = [f"{name} is {value}" for name, value in attrs.asdict(self).items() if value < 1]
        if low:
            raise ValueFault(f"limits must be at least 1; {', '.join(low)}")


@attrs.frozen(kw_only=True)
class SandboxRun:
    """One execution of the tested code, in its own process.

    Attributes:
        input: Standard input.
        steps: Test steps on the module defined by the code; None if the code is a program.
        names: Names that the steps may use from that module.
    """

    input: bytes = b""
    steps: Sequence[Step] | None = None
    names: Sequence[str] = ()


@attrs.frozen
class SandboxResult:
    """Result of a run.

    Attributes:
        status: Exit status, negative for a signal; None if the run was stopped.
        output: Standard output of a program, or the result lines of steps.
        errors: End of the standard error.
        stopped: `time` if it ran out of time, `output` if it wrote too much.
    """

    status: int | None
    output: bytes
    errors: bytes
    stopped: Literal["", "time", "output"] = ""


def run(
    code: Sequence[str],
    runs: Sequence[SandboxRun],
    *,
    timeout: float,
    limits: SandboxLimits,
    isolation: Isolation = "namespaces",
    packages: bool = False,
) -> list[SandboxResult]:
    """Execute code as one module, once for each of `runs`, sequentially.

    Args:
        code: Python source, in consecutive parts.
        runs: Inputs or test steps of each run.
        timeout: Total seconds for all runs.
        limits: Resource limits.
        isolation: `namespaces` or `none`.
        packages: Make the packages of this Python visible and importable.

    Returns:
        Result of each run; the list ends with the run that used up the time of the remaining ones.

    Raises:
        EnvironmentFault: The sandbox could not be built, or did not answer.
    """
    needed = isolation == "none"  # otherwise, the code writes to a file system of its own
    with tempfile.TemporaryDirectory(prefix="rlsdk-code-") if needed else contextlib.nullcontext("") as folder:
        request = _request(code, runs, timeout, limits, folder, packages)
        kind, ran = _parsed(_launch(request, timeout + _GRACE))
    if kind == "ready":
        return ran
    reason = kind or "it ended, or ran out of time, before it was ready"
    raise EnvironmentFault(f"the sandbox did not start: {reason}")


def missing() -> str:
    """Return the reason why this machine cannot isolate code, found by trying; empty if it can."""
    if sys.platform != "linux":
        return f"only Linux has namespaces, and this is {sys.platform}"
    try:
        _tried("", SandboxLimits(), "namespaces", False)
    except EnvironmentFault as error:
        return str(error)
    return ""


def require(prelude: str, limits: SandboxLimits, isolation: Isolation, packages: bool) -> None:
    """Raise an error if this machine cannot isolate code, or a trivial program fails in the sandbox.

    Raises:
        ValueFault: Says what is missing, and what to do.
    """
    if isolation == "namespaces" and (fault := missing()):
        raise ValueFault(
            f"code that a model wrote cannot be isolated on this machine: {fault}. Allow namespaces to this user "
            "(sysctl user.max_user_namespaces above 0; kernel.apparmor_restrict_unprivileged_userns=0 on Ubuntu; a "
            "container that may call unshare and mount), or set `isolation: none`, under which that code can do "
            "whatever you can"
        )
    ran = _tried(prelude, limits, isolation, packages)
    if ran.status != 0:
        reason = ran.errors.decode("utf-8", "replace").strip().rpartition("\n")[2] or f"status {ran.status}"
        raise ValueFault(
            f"no code can pass: with this prelude and these limits a program of one line fails with: {reason}"
        )


@functools.lru_cache(maxsize=16)
def _tried(prelude: str, limits: SandboxLimits, isolation: Isolation, packages: bool) -> SandboxResult:
    """Run a program that takes a little memory in the sandbox and return its result.

    The limit of a process applies to new mappings only, so a program that allocates nothing would pass any limit.
    """
    (ran,) = run(
        [prelude, f"\nbytearray({4 * _MIB})\n"],
        [SandboxRun()],
        timeout=10,
        limits=limits,
        isolation=isolation,
        packages=packages,
    )
    return ran


def _request(
    code: Sequence[str], runs: Sequence[SandboxRun], timeout: float, limits: SandboxLimits, folder: str, packages: bool
) -> dict[str, Any]:
    extra = list(dict.fromkeys(sysconfig.get_path(name) for name in ("purelib", "platlib"))) if packages else []
    size = {
        name: value * _MIB for name, value in attrs.asdict(limits).items() if name not in ("cpu", "processes", "files")
    }
    return {
        "parent": os.getpid(),
        "isolated": not folder,
        "folder": folder,
        "visible": _visible(extra),
        "packages": extra,
        "limits": {**attrs.asdict(limits), **size, "timeout": timeout},
        "code": list(code),
        "runs": [
            {"input": r.input, "steps": None if r.steps is None else list(r.steps), "names": list(r.names)}
            for r in runs
        ],
    }


def _visible(extra: Sequence[str]) -> list[str]:
    """Return the paths that the code can read, without paths nested in others."""
    base = {"base": sys.base_prefix, "platbase": sys.base_exec_prefix}  # not a virtual environment's
    folders = [sysconfig.get_path(name, vars=base) for name in ("stdlib", "platstdlib")]
    library = sysconfig.get_config_var("LIBDIR")
    if library and Path(library).is_relative_to(sys.base_prefix):
        folders.append(library)
    paths = sorted({path for path in (*folders, *extra, *_SYSTEM) if os.path.exists(path)})
    return [path for path in paths if not any(Path(other) in Path(path).parents for other in paths)]


def _launch(request: dict[str, Any], seconds: float) -> bytes:
    python = getattr(sys, "_base_executable", sys.executable)
    started = subprocess.Popen(
        [python, "-I", "-S", "-X", "utf8", "-c", _BOOT, str(_PACKAGE)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env={},
        cwd="/",
        start_new_session=True,
    )
    with started:
        try:
            return started.communicate(marshal.dumps(request), timeout=seconds)[0]
        except subprocess.TimeoutExpired:
            started.kill()  # and with it all processes in its namespaces
            return started.communicate()[0]
        except BaseException:
            started.kill()
            raise


def _parsed(report: bytes) -> tuple[str, list[SandboxResult]]:
    """Parse the launcher's report: `ready`, empty or its fault, and the completely reported runs."""
    kind, results, place = "", [], 0
    while (end := report.find(b"\n", place)) >= 0:
        word, *values, size = report[place:end].decode().split(" ")
        content = report[end + 1 : end + 1 + int(size)]
        place = end + 1 + int(size)
        if len(content) < int(size):  # it was killed while writing
            break
        if word == "fault":
            return content.decode("utf-8", "replace"), []
        if word == "run":
            stopped, errors = values[0], int(values[1])
            status = None if stopped in ("time", "output") else int(stopped)
            results.append(SandboxResult(status, content[errors:], content[:errors], stopped if status is None else ""))  # type: ignore[arg-type]
        kind = "ready"
    return kind, results
