"""A cluster as users start it, with `ray start` on each machine; each has its own home folder and token here."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil

from tests.ports import free_port

ATTEMPTS = 5
"""How often a node is started: on a busy machine Ray's own time limits can be too short."""
RAY = str(Path(sys.executable).with_name("ray"))


class Raylets:
    """Nodes of one cluster on this machine.

    Attributes:
        address: `HOST:PORT` of the cluster.
        environment: Variables of a shell on one of its machines, without `RAY_AUTH_MODE`.
    """

    def __init__(self, folder: Path, address: str = "") -> None:
        self.address = address or f"127.0.0.1:{free_port()}"
        gone = {"RAY_ADDRESS", "RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"}
        self.environment = {name: value for name, value in os.environ.items() if name not in gone} | {
            "HOME": str(folder / "home"),
            "RAY_TMPDIR": str(folder),
            "RAY_USAGE_STATS_ENABLED": "0",
            "RAY_worker_niceness": "0",
        }
        self._log = folder / "raylets.log"
        self._started: list[subprocess.Popen[Any]] = []
        (folder / "home").mkdir()
        made = subprocess.run(
            [RAY, "get-auth-token", "--generate"], env=self.environment, capture_output=True, text=True, check=True
        )
        self.token = made.stdout.strip()

    def start(
        self,
        *arguments: str,
        resources: dict[str, float] | None = None,
        inside: Sequence[str] = (),
        **environment: str,
    ) -> None:
        """Run `ray start --block`, by a command such as `nsenter` if given, and wait until the cluster has the node."""
        command = [*inside, RAY, "start", "--block", "--resources", json.dumps(resources or {}), *arguments]
        for _ in range(ATTEMPTS):
            with self._log.open("w") as log:
                process = subprocess.Popen(
                    command, env=self.environment | environment, stdout=log, stderr=log, start_new_session=True
                )
            self._started.append(process)
            while process.poll() is None:
                if "Ray runtime started" in self._log.read_text():
                    return
                time.sleep(0.2)
            self._kill(self._started.pop())
        raise AssertionError(f"not started in {ATTEMPTS} attempts: {self._log.read_text()[-3000:]}")

    def head(self, *arguments: str, **given: Any) -> None:
        """Start the first node, without a word about tokens: Ray finds one, and requires it."""
        port = self.address.rpartition(":")[2]
        alone = ["--head", "--port", port, "--num-cpus", "2", "--include-dashboard", "false"]
        self.start(*alone, *arguments, **given)

    def join(self, resources: dict[str, float] | None = None, **environment: str) -> None:
        """Start another node, as docs/howto/cluster.md says."""
        tokens = {"RAY_AUTH_MODE": "token", **environment}
        self.start("--address", self.address, "--num-cpus", "2", resources=resources, **tokens)

    def end(self) -> None:
        """Kill all processes of the nodes."""
        for process in self._started:
            self._kill(process)

    def _kill(self, process: subprocess.Popen[Any]) -> None:
        """Kill all processes of a node: those of its folder that belong to the session of its `ray start`."""
        for each in psutil.process_iter():
            try:
                if os.getsid(each.pid) == process.pid:
                    each.kill()
            except (psutil.NoSuchProcess, ProcessLookupError, PermissionError):
                continue
        process.wait()


@contextmanager
def raylets(folder: Path, address: str = "") -> Iterator[Raylets]:
    """Nodes that end with the block; their folder has a short name, as paths of sockets must."""
    cluster = Raylets(folder, address)
    try:
        yield cluster
    finally:
        cluster.end()
