"""The driver's side of the process that scoring processes are forked from."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from rlsdk.errors import ScoringError
from rlsdk.isolation.framing import receive, send
from rlsdk.plugins import ComponentRef
from rlsdk.scoring.worker import BROKEN, FORK

_REMEMBERED = 1000
_LAST_WORDS = 0.5
"""Seconds to wait for the template to tell how a process ended."""
_BOOT = """
import json, sys
sys.path[:] = json.loads(sys.argv[1])
from rlsdk.scoring.worker import main
main(int(sys.argv[2]))
"""


class WorkerTemplate:
    """A process that has imported the rewards, and forks on request."""

    def __init__(self, rewards: Sequence[ComponentRef], memory: int, log_to: Path | None) -> None:
        import cloudpickle

        self._control, theirs = socket.socketpair()
        with theirs, open(log_to or os.devnull, "ab") as output:
            # The threads of BLAS would be lost by the fork, and take the cores of others.
            single = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
            stream = output if log_to else 2
            self._process = subprocess.Popen(
                [sys.executable, "-c", _BOOT, json.dumps(sys.path), str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                env={**os.environ, **single},
                stdin=subprocess.DEVNULL,
                stdout=stream,
                stderr=stream,
                process_group=0,
            )
        self._endings: dict[int, int] = {}
        try:
            # By value where an object stands in place of a name; all else by reference.
            send(self._control, cloudpickle.dumps((list(rewards), memory)))
            answer = receive(self._control)
        except (EOFError, ConnectionError) as error:
            self.close()
            raise ScoringError(f"the scoring processes did not start; see {log_to or 'standard error'}") from error
        if answer.startswith(BROKEN):
            self.close()
            raise ScoringError(f"the scoring processes did not start: {answer[1:].decode()}")

    def watch(self) -> None:
        """Take notice, in this event loop, of forks that end."""
        self._told = asyncio.Event()
        asyncio.get_running_loop().add_reader(self._control, self._notice)

    def _notice(self) -> None:
        try:
            pid, code = json.loads(receive(self._control))
        except (EOFError, OSError):
            asyncio.get_running_loop().remove_reader(self._control)
            return
        self._endings[pid] = code
        while len(self._endings) > _REMEMBERED:  # of those that were killed nobody asks
            self._endings.pop(next(iter(self._endings)))
        self._told.set()

    async def ending(self, pid: int) -> str:
        """Describe how a fork ended."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_LAST_WORDS):
                while pid not in self._endings:
                    self._told.clear()
                    await self._told.wait()
        code = self._endings.pop(pid, None)
        if code is None:
            return "nobody saw how"
        if code >= 0:
            return f"exit status {code}"
        return f"killed by {signal.Signals(-code).name}"

    def fork(self, connection: socket.socket) -> bool:
        """Have a process forked that serves the other end of `connection`; False if the template is gone."""
        try:
            socket.send_fds(self._control, [FORK], [connection.fileno()])
        except OSError:
            return False
        return self._process.poll() is None

    def close(self) -> None:
        """End it; its forks end with it."""
        with contextlib.suppress(RuntimeError, OSError, ValueError):
            asyncio.get_running_loop().remove_reader(self._control)
        self._control.close()
        self._process.kill()
        self._process.wait()
