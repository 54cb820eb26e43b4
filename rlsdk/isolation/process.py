"""Process-level settings of a run's processes."""

from __future__ import annotations

import ctypes
import gc
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_LIBC = ctypes.CDLL(None) if sys.platform == "linux" else None
_PR_SET_PDEATHSIG = 1


@contextmanager
def hidden(name: str) -> Iterator[None]:
    """In the block, importing a module fails as if it were not installed, unless it has been imported before."""
    if name in sys.modules:
        yield
        return
    sys.modules[name] = None  # type: ignore[assignment]
    try:
        yield
    finally:
        del sys.modules[name]


@contextmanager
def importing() -> Iterator[None]:
    """Look for no garbage in the block, nor ever among what exists after it: a quarter of the time of large imports."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        if enabled:
            gc.enable()


def redirect(path: str | os.PathLike[str]) -> None:
    """Send what this process writes to stdout and stderr, C code included, to the end of a file."""
    file = Path(path)
    file.parent.mkdir(parents=True, exist_ok=True)
    sys.stdout.flush()
    sys.stderr.flush()
    with file.open("ab", buffering=0) as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)


def settle() -> None:
    """Exclude all objects that exist now from garbage collection: imports and loaded models stay anyway."""
    gc.collect()
    gc.freeze()


def end_with_parent(parent: int) -> None:
    """End this process when its parent does (Linux), and at once if that has ended already."""
    if _LIBC is not None:
        _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(1)


def fork_alone() -> None:
    """Give a fork its own process group, end it with its parent, and shield it from interrupts."""
    os.setpgid(0, 0)  # no session of its own: that would be a scheduling group, in which niceness means nothing
    end_with_parent(os.getppid())
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the driver decides what an interrupt ends


def limit_memory(extra: int) -> None:
    """Limit the address space of this process (Linux) to its present size and some bytes more; no core is dumped."""
    import resource  # not on Windows

    if sys.platform == "linux":
        size = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (size + extra, size + extra))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
