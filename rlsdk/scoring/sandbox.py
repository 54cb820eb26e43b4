"""Runs code that a model wrote, in processes that are locked in and do not outlive the call.

With `namespaces` (Linux) the code has no network, sees Python's standard library and system libraries and nothing else
of the file system, can write to one folder in memory, has neither rights nor the environment, and shares no process, no
memory and no name with the rest of the machine; all of it dies with the first process of its namespace, and that one
with its caller. With `none` there are limits for each process, an empty environment and a temporary folder, and that is
all: the code can do what you can.
"""

from __future__ import annotations

import functools
import marshal
import os
import secrets
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import attrs

from rlsdk.errors import EnvironmentFault, ValueFault
from rlsdk.scoring.jail.play import Step

Isolation = Literal["namespaces", "none"]

_MIB = 2**20
_GRACE = 2.0
"""Seconds beyond its time for the sandbox to start and to end by itself."""

_SYSTEM = ("/lib", "/lib64", "/usr/lib", "/usr/lib64", "/etc/ld.so.cache", "/usr/share/zoneinfo")
"""What Python's own modules load: libraries, and names of time zones."""

_PACKAGE = Path(__file__).resolve().parents[1]
_BOOT = """
import sys, types
stub = types.ModuleType("rlsdk")
stub.__path__ = [sys.argv.pop()]
sys.modules["rlsdk"] = stub
from rlsdk.scoring.jail.main import main
main()
"""
"""Imports the launcher without what `import rlsdk` runs."""


@attrs.frozen(kw_only=True)
class Limits:
    """What tested code may use.

    Attributes:
        cpu: Seconds of processor time, for each process.
        memory: MiB of address space, for each process.
        processes: Processes and threads at a time; only under isolation, and not for root without CAP_SYS_ADMIN.
        files: Open files, for each process.
        disk: MiB in its folder, for all files together; only under isolation.
        file: MiB of one file.
        output: MiB of what it writes to its standard output, over all its runs.
    """

    cpu: int = 6
    memory: int = 1024
    processes: int = 16
    files: int = 64
    disk: int = 64
    file: int = 16
    output: int = 4

    def __attrs_post_init__(self) -> None:
        low = [f"{name} is {value}" for name, value in attrs.asdict(self).items() if value < 1]
        if low:
            raise ValueFault(f"a limit is at least 1; {', '.join(low)}")


@attrs.frozen(kw_only=True)
class Run:
    """One process of the tested code.

    Attributes:
        input: What it reads from its standard input.
        steps: What to do with the module that the code makes; None: the code is a program.
        token: That marks lines of results of the steps.
    """

    input: bytes = b""
    steps: Sequence[Step] | None = None
    token: str = attrs.field(factory=lambda: secrets.token_hex(8))


@attrs.frozen
class Ran:
    """How a run ended.

    Attributes:
        status: Exit status, negative for a signal; None where it was stopped.
        output: Of a program: its standard output; of steps: their lines.
        errors: The end of its standard error.
        stopped: `time` where it had to be killed, `output` where it wrote too much.
    """

    status: int | None
    output: bytes
    errors: bytes
    stopped: Literal["", "time", "output"] = ""


def run(
    code: Sequence[str],
    runs: Sequence[Run],
    *,
    timeout: float,
    limits: Limits,
    isolation: Isolation = "namespaces",
    packages: bool = False,
) -> list[Ran]:
    """Run code, as one module, once for each of `runs`, one after the other.

    Args:
        code: Python, each part of which continues the one before.
        runs: What it is run with.
        timeout: Seconds for all runs together.
        limits: What it may use.
        isolation: `namespaces` or `none`.
        packages: Whether the packages of this Python can be imported, and seen.

    Returns:
        How each run ended; the list ends with the run that took the time of those that would have followed.

    Raises:
        EnvironmentFault: The sandbox could not be built, or did not answer.
    """
    with tempfile.TemporaryDirectory(prefix="rlsdk-code-") if isolation == "none" else _Nowhere() as folder:
        request = _request(code, runs, timeout, limits, folder, packages)
        report = _served(request, timeout + _GRACE)
    kind, ran = _read(report)
    if kind == "ready":
        return ran
    said = kind or "it ended, or ran out of time, before it was ready"
    raise EnvironmentFault(f"the sandbox did not start: {said}")


def missing() -> str:
    """What keeps this machine from isolating code, found by trying it; empty if nothing does."""
    if sys.platform != "linux":
        return f"namespaces are Linux's, and this is {sys.platform}"
    try:
        _tried("", Limits(), "namespaces", False)
    except EnvironmentFault as error:
        return str(error)
    return ""


def require(prelude: str, limits: Limits, isolation: Isolation, packages: bool) -> None:
    """Refuse to go on where code could not be isolated, or not even a program that does nothing would run.

    Raises:
        ValueFault: Says what is missing, and what to do.
    """
    if isolation == "namespaces" and (fault := missing()):
        raise ValueFault(
            f"code that a model wrote cannot be isolated on this machine: {fault}. Allow namespaces to this user "
            "(sysctl user.max_user_namespaces above 0; kernel.apparmor_restrict_unprivileged_userns=0 on Ubuntu; a "
            "container that may call unshare and mount), or write `isolation: none`, under which that code can do "
            "whatever you can"
        )
    ran = _tried(prelude, limits, isolation, packages)
    if ran.status != 0:
        said = ran.errors.decode("utf-8", "replace").strip().rpartition("\n")[2] or f"status {ran.status}"
        raise ValueFault(f"no code can pass: with this prelude and these limits an empty program fails with: {said}")


@functools.lru_cache(maxsize=16)
def _tried(prelude: str, limits: Limits, isolation: Isolation, packages: bool) -> Ran:
    """How a program ends that does nothing."""
    (ran,) = run([prelude], [Run()], timeout=10, limits=limits, isolation=isolation, packages=packages)
    return ran


class _Nowhere:
    """Stands for a folder where none is needed."""

    def __enter__(self) -> str:
        return ""

    def __exit__(self, *_: object) -> None:
        pass


def _request(
    code: Sequence[str], runs: Sequence[Run], timeout: float, limits: Limits, folder: str, packages: bool
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
            {"input": r.input, "steps": None if r.steps is None else list(r.steps), "token": r.token} for r in runs
        ],
    }


def _visible(extra: Sequence[str]) -> list[str]:
    """What of the file system the code can read; nothing that lies within another."""
    base = {"base": sys.base_prefix, "platbase": sys.base_exec_prefix}  # not those of a virtual environment
    own = [sysconfig.get_path(name, vars=base) for name in ("stdlib", "platstdlib")]
    library = sysconfig.get_config_var("LIBDIR")
    if library and Path(library).is_relative_to(sys.base_prefix):
        own.append(library)
    paths = sorted({path for path in (*own, *extra, *_SYSTEM) if os.path.exists(path)})
    return [path for path in paths if not any(Path(other) in Path(path).parents for other in paths)]


def _served(request: dict[str, Any], seconds: float) -> bytes:
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
            started.kill()  # and with it all that lives in its namespaces
            return started.communicate()[0]
        except BaseException:
            started.kill()
            raise


def _read(report: bytes) -> tuple[str, list[Ran]]:
    """What the launcher wrote: `ready`, nothing or its fault; and the runs that it reported in full."""
    kind, found, place = "", [], 0
    while (end := report.find(b"\n", place)) >= 0:
        word, *values, size = report[place:end].decode().split(" ")
        content = report[end + 1 : end + 1 + int(size)]
        place = end + 1 + int(size)
        if len(content) < int(size):  # it was killed while it wrote
            break
        if word == "fault":
            return content.decode("utf-8", "replace"), []
        if word == "run":
            stopped, errors = values[0], int(values[1])
            status = None if stopped in ("time", "output") else int(stopped)
            found.append(Ran(status, content[errors:], content[:errors], stopped if status is None else ""))  # type: ignore[arg-type]
        kind = "ready"
    return kind, found
