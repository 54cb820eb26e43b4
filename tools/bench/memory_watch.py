"""Peak memory of a trainer and of all processes that it started, identified by an environment variable."""

from __future__ import annotations

import contextlib
import threading
from typing import Any, Self

import psutil

MARK = "BENCH_PEERS_RUN"
"""Environment variable that all processes of a run inherit, including Ray's, which leave their parents' tree."""
SECONDS = 2.0


class MemoryWatch:
    """Samples the total PSS of all marked processes, in which a shared page counts once."""

    def __init__(self, mark: str) -> None:
        self._mark = mark
        self._peak = 0
        self._processes = 0
        self._known: dict[int, bool] = {}
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def found(self) -> dict[str, Any]:
        """Return the peak in MiB, and the number of processes at the peak."""
        return {"peak_pss_mib": round(self._peak / 2**20), "processes": self._processes, "sampled_every_s": SECONDS}

    def _watch(self) -> None:
        while not self._over.wait(SECONDS):
            sizes = [size for process in psutil.process_iter() if (size := self._size(process))]
            if sum(sizes) > self._peak:
                self._peak, self._processes = sum(sizes), len(sizes)

    def _size(self, process: psutil.Process) -> int:
        """Return the bytes of a process; 0 if it is not marked or has ended."""
        with contextlib.suppress(psutil.Error, OSError):
            if process.pid not in self._known:
                self._known[process.pid] = process.environ().get(MARK) == self._mark
            if self._known[process.pid]:
                return int(process.memory_full_info().pss)
        return 0
