"""Commands in forks of one process that has imported libraries, which answer in a fraction of the time.

A fork has the libraries that the command would import anyway; everything else is as in a process of its own: arguments,
environment, folder, output, exit status. Run as a program, this module is the process that is forked.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import runpy
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

SHARED_IMPORTS = ("torch", "torch._meta_registrations", "transformers.models.auto.tokenization_auto", "hypothesis")
"""Libraries that `rlsdk explain` and `rlsdk check` import; nothing of rlsdk, so that each command loads it itself."""

LIMIT = 120
"""Seconds after which a fork that hangs is killed."""


class WarmPython:
    """A Python process that runs modules in forks of itself.

    Args:
        environment: Environment variables of the process and its forks.
        imports: Libraries that the process imports.
    """

    def __init__(self, environment: Mapping[str, str], imports: Iterable[str] = SHARED_IMPORTS) -> None:
        command = [sys.executable, __file__, *imports]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=dict(environment)
        )

    def run(self, module: str, *arguments: str | Path, cwd: Path) -> subprocess.CompletedProcess[str]:
        """Run `python -m MODULE ARGUMENTS…` in a fork, and wait for its end."""
        assert self._process.stdin and self._process.stdout
        with tempfile.TemporaryDirectory() as folder:
            outputs = [Path(folder) / name for name in ("stdout", "stderr")]
            order = {
                "argv": [module, *map(str, arguments)],
                "cwd": str(cwd),
                "outputs": [str(path) for path in outputs],
            }
            self._process.stdin.write(json.dumps(order) + "\n")
            self._process.stdin.flush()
            status = int(self._process.stdout.readline())
            return subprocess.CompletedProcess(order["argv"], status, *(Path(path).read_text() for path in outputs))

    def close(self) -> None:
        """End the process."""
        self._process.communicate()


def serve() -> None:
    """Fork for each order on standard input, and answer with the exit status of the fork."""
    for name in sys.argv[1:]:
        importlib.import_module(name)
    gc.freeze()  # a collection in a fork would copy every page of what is imported
    for line in sys.stdin:
        child = os.fork()
        if not child:
            run_order(json.loads(line))
            return
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)


def run_order(order: Mapping[str, Any]) -> None:
    """Run a module as the program of this process."""
    for number, path in enumerate((os.devnull, *order["outputs"])):
        os.dup2(os.open(path, os.O_RDWR | os.O_CREAT), number)
    signal.alarm(LIMIT)
    os.chdir(order["cwd"])
    sys.path[0] = order["cwd"]
    module, *sys.argv[1:] = order["argv"]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    serve()
