"""Settings of a run's processes: imports, memory, output, signals, and their end with their parent."""

from __future__ import annotations

import ctypes
import gc
import io
import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

_LIBC = ctypes.CDLL(None) if sys.platform == "linux" else None
_PR_SET_PDEATHSIG = 1


@contextmanager
def hidden(name: str) -> Iterator[None]:
    """Make importing a module fail in the block as if it were not installed, unless it is already imported."""
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
    """Disable garbage collection in the block and freeze all objects after it; saves 25% of large imports' time."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        if enabled:
            gc.enable()


def redirect(path: str | os.PathLike[str]) -> None:
    """Append the stdout and stderr of this process, including C code's, to a file.

    Characters that the locale's encoding lacks are escaped, so that no print of a user's code fails because of one.
    """
    file = Path(path)
    file.parent.mkdir(parents=True, exist_ok=True)
    sys.stdout.flush()
    sys.stderr.flush()
    with file.open("ab", buffering=0) as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")


@contextmanager
def environment_variable(name: str, value: str | None) -> Iterator[None]:
    """Context manager: set an environment variable of this process for the block, or remove it if `value` is None."""
    before = os.environ.get(name)
    _set_variable(name, value)
    try:
        yield
    finally:
        _set_variable(name, before)


def _set_variable(name: str, value: str | None) -> None:
    if value is None:
        os.environ.pop(name, None)
    else:
        os.environ[name] = value


def settle(*, rollouts: bool = False) -> None:
    """Exclude all current objects from garbage collection, since imports and loaded models stay anyway.

    Args:
        rollouts: True in a process that makes rollouts. It holds tens of thousands of new objects at a time, nearly all
            without cycles, which the collector would search many times per step; it then runs less often.
    """
    gc.collect()
    gc.freeze()
    if rollouts:
        gc.set_threshold(50_000, *gc.get_threshold()[1:])


def end_with_parent(parent: int) -> None:
    """End this process when its parent ends (Linux), or immediately if the parent has already ended."""
    if _LIBC is not None:
        _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(1)


def fork_alone() -> None:
    """Give a fork its own process group, end it with its parent, and shield it from interrupts."""
    os.setpgid(0, 0)  # not setsid: niceness has no effect across sessions, which are scheduling groups
    end_with_parent(os.getppid())
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the driver handles interrupts


def limit_memory(extra: int) -> None:
    """Limit the private memory of this process to its current size plus `extra` bytes (Linux); disable core dumps.

    Mapped files do not count: torch's build for CUDA alone maps 3 GB of libraries when a reward imports it.
    """
    import resource  # not on Windows

    if sys.platform == "linux":
        size = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[5]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_DATA, (size + extra, size + extra))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def interrupt_on_sigterm(_: int, frame: FrameType | None) -> None:
    """Handle SIGTERM as SIGINT is handled at this moment; interrupt if SIGINT is ignored, as in `rlsdk … &`."""
    handler = signal.getsignal(signal.SIGINT)
    (handler if callable(handler) else signal.default_int_handler)(signal.SIGINT, frame)


def interrupt_on_hangup(number: int, frame: FrameType | None) -> None:
    """Handle the first SIGHUP like SIGTERM: when a terminal closes, both the kernel and the shell may send it."""
    signal.signal(number, signal.SIG_IGN)
    interrupt_on_sigterm(number, frame)


@contextmanager
def sigterm_as_interrupt() -> Iterator[None]:
    """Handle SIGTERM like Ctrl-C while a block runs, unless the program has a handler of its own.

    This covers the start and the end of a run, when its own handler is not installed. No effect outside the main
    thread, since only that one can handle signals.
    """
    main = threading.current_thread() is threading.main_thread()
    if not main or signal.getsignal(signal.SIGTERM) != signal.SIG_DFL:
        yield
        return
    signal.signal(signal.SIGTERM, interrupt_on_sigterm)
    try:
        yield
    finally:
        main = threading.current_thread() is threading.main_thread()  # which another thread may leave the block for
        if main and signal.getsignal(signal.SIGTERM) is interrupt_on_sigterm:  # unless the block has installed another
            signal.signal(signal.SIGTERM, signal.SIG_DFL)


@contextmanager
def interrupts_kept() -> Iterator[None]:
    """Raise KeyboardInterrupt at the end of a block if one was lost in it.

    Python prints and ignores exceptions in the hooks that it calls around a fork with a `preexec_fn`, as Ray starts its
    processes: Ctrl-C or SIGTERM at that moment would be lost. No effect on a program with a handler of its own, or
    outside the main thread.
    """
    before = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or before is not signal.default_int_handler:
        yield
        return
    interrupts: list[int] = []

    def interrupt(number: int, frame: FrameType | None) -> None:
        interrupts.append(number)
        signal.default_int_handler(number, frame)

    signal.signal(signal.SIGINT, interrupt)
    try:
        yield
    except Exception as error:
        if interrupts:
            raise KeyboardInterrupt from error
        raise
    finally:
        if signal.getsignal(signal.SIGINT) is interrupt:  # unless the block has installed another
            signal.signal(signal.SIGINT, before)
    if interrupts:
        raise KeyboardInterrupt


def restore_sigterm() -> None:
    """Install the program's own handler of SIGTERM again, if it has one.

    Ray's core puts a native one in front of it, which prints a stack, and aborts the process three seconds later.
    """
    handler = signal.getsignal(signal.SIGTERM)
    if threading.current_thread() is threading.main_thread() and callable(handler):
        signal.signal(signal.SIGTERM, handler)
