"""A separate process that ends all processes of a run when the driver's pipe closes.

Ray's processes end when the driver shuts down cleanly; if the driver is killed, Ray's agents stay alive.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import psutil

MARK = "RLSDK_RUN_MARK"
"""Environment variable inherited by all processes of a run."""
GRACE_SECONDS = 3.0
"""Seconds that processes have to exit by themselves before SIGKILL."""
SWEEPS = 5


_early: list[str] = []
"""Mark of the processes started by `marked_early`, for the next `reaped`."""


@contextmanager
def marked_early() -> Iterator[None]:
    """Let the next `reaped` of this process also end what is left of the processes started in this block."""
    from rlsdk.isolation.process import environment_variable  # the reaper itself imports nothing of rlsdk

    _early[:] = _early or [uuid.uuid4().hex]
    with environment_variable(MARK, _early[0]):
        yield


@contextmanager
def reaped() -> Iterator[None]:
    """Ensure that every process started in the block ends within seconds of its exit, by SIGKILL if necessary."""
    mark = _early.pop() if _early else uuid.uuid4().hex
    os.environ[MARK] = mark
    os.environ.setdefault("SPT_NOENV", "1")  # Ray's process titles would overwrite the environment that `marked` reads
    # Without the mark, the reaper does not kill itself; in its own session, it does not receive Ctrl-C.
    environment = {k: v for k, v in os.environ.items() if k != MARK}
    command = [sys.executable, __file__, mark]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, env=environment, start_new_session=True, stdout=subprocess.DEVNULL
    ) as reaper:
        try:
            yield
        finally:
            os.environ.pop(MARK, None)
            assert reaper.stdin is not None
            reaper.stdin.close()


@contextmanager
def unmarked() -> Iterator[None]:
    """Start processes in the block that may outlive the run; they must end with this process by themselves."""
    from rlsdk.isolation.process import environment_variable

    with environment_variable(MARK, None):
        yield


def marked(mark: str) -> list[psutil.Process]:
    """Find the processes that carry the run's mark in their environment."""
    import psutil  # `rlsdk explain` imports this module where no training is installed

    processes = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):  # it has exited, or belongs to another user
            if process.environ().get(MARK) == mark:
                processes.append(process)
    return processes


def _is_tracker(process: psutil.Process) -> bool:
    import psutil

    try:
        return any("multiprocessing.resource_tracker" in part for part in process.cmdline())
    except psutil.Error:  # it has exited
        return False


def main() -> None:
    """Wait for the end of standard input, then end all processes with the mark."""
    import psutil

    mark = sys.argv[1]
    sys.stdin.read()
    end = time.monotonic() + GRACE_SECONDS
    while marked(mark) and time.monotonic() < end:
        time.sleep(0.2)
    for _ in range(SWEEPS):  # a killed process may have started another
        left = marked(mark)
        # Python's resource trackers end after the processes whose shared memory they then delete.
        for process in [each for each in left if not _is_tracker(each)] or left:
            with contextlib.suppress(psutil.Error):
                process.kill()
        if not left:
            return
        psutil.wait_procs(left, timeout=1)


if __name__ == "__main__":
    main()
