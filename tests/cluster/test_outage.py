"""A run on two machines with a network of their own each, one of which is cut: Linux network namespaces on a bridge."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import attrs
import psutil
import pytest
import yaml

from rlsdk.cluster.placement import VARIABLES
from tests.cluster.raylets import raylets
from tests.run.conftest import CONFIG

pytestmark = [pytest.mark.stack, pytest.mark.slow, pytest.mark.timeout(900)]
ROOT = Path(__file__).resolve().parents[2]
SECONDS = 25.0
"""Length of the outage; by Ray's defaults, connections break after 20 s."""


def ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True)


@attrs.frozen
class Machine:
    """A machine with its own network, processes, host name, `/dev/shm` and Ray folder.

    Attributes:
        name: Name of its host and of its network namespace.
        address: Its IP address.
        port: Arguments of `ip` that set the state of the port of the bridge that it is connected to.
        pid: Id of its first process.
    """

    name: str
    address: str
    port: Sequence[str]
    pid: int

    @property
    def inside(self) -> list[str]:
        """Command that runs another one on this machine."""
        return ["nsenter", "--target", str(self.pid), "--net", "--mount", "--pid", "--uts"]


@contextmanager
def machines(count: int, folder: Path) -> Iterator[list[Machine]]:
    """Machines that reach each other, and nothing else; their names hold a pid, as other tests may run beside.

    Args:
        count: Number of machines.
        folder: Folder in which Ray keeps its files, which exists on each machine.
    """
    switch = f"switch-{os.getpid()}"
    with ExitStack() as stack:

        def namespace(name: str) -> None:
            ip("netns", "add", name)
            stack.callback(ip, "netns", "delete", name)
            ip("-n", name, "link", "set", "lo", "up")

        namespace(switch)
        ip("-n", switch, "link", "add", "bridge", "up", "type", "bridge")
        made = []
        for i in range(1, count + 1):
            name, port = f"machine-{os.getpid()}-{i}", f"port-{i}"
            namespace(name)
            ip("link", "add", "eth", "netns", name, "type", "veth", "peer", "name", port, "netns", switch)
            ip("-n", switch, "link", "set", port, "master", "bridge", "up")
            ip("-n", name, "address", "add", f"10.77.0.{i}/24", "dev", "eth")
            ip("-n", name, "link", "set", "eth", "up")
            boot = f"hostname {name}; mount -t tmpfs tmpfs /dev/shm; mount -t tmpfs tmpfs {folder}; exec sleep infinity"
            isolated = ["unshare", "--mount", "--uts", "--pid", "--fork", "--kill-child", "--mount-proc"]
            process = subprocess.Popen(["ip", "netns", "exec", name, *isolated, "sh", "-c", boot])
            stack.callback(process.wait)
            stack.callback(process.kill)
            while not (first := psutil.Process(process.pid).children()) or first[0].name() != "sleep":
                time.sleep(0.05)
            made.append(Machine(name, f"10.77.0.{i}", ["-n", switch, "link", "set", port], first[0].pid))
        yield made


def can_make_networks() -> bool:
    if shutil.which("ip") is None:
        return False
    try:
        with machines(1, Path("/mnt")):
            return True
    except subprocess.CalledProcessError:
        return False


def until(steps: int, run: Path, process: subprocess.Popen[bytes], seconds: float) -> None:
    """Wait until a run has finished some steps."""
    metrics, end = run / "metrics.jsonl", time.monotonic() + seconds
    while not metrics.is_file() or metrics.read_bytes().count(b"\n") < steps:
        assert process.poll() is None, (run.parent / "console.log").read_text()[-4000:]
        assert time.monotonic() < end, (run.parent / "console.log").read_text()[-4000:]
        time.sleep(0.2)


@pytest.fixture
def folder() -> Iterator[Path]:
    """A folder with a short name, as paths of sockets must have."""
    made = Path(tempfile.mkdtemp(prefix="ro-", dir="/tmp"))
    yield made
    shutil.rmtree(made, ignore_errors=True)


def test_a_run_waits_for_a_network_that_fails_for_a_while(folder: Path) -> None:
    """Engine and learner are on a machine each; the one with the driver is cut off."""
    if not can_make_networks():
        pytest.skip("needs `ip`, and the right to make network namespaces")
    config = CONFIG | {
        "name": "run",
        "out": str(folder),
        "model": {"path": str(ROOT / "examples" / "models" / "countdown-nano"), "max_length": 32},
        "engine": "transformers",
        "steps": 100_000,
        "eval": {"before": False, "after": False},
        "placement": {
            "engine_threads": 1,
            "learner_threads": 1,
            "ray": "10.77.0.1:6379",
            "engine_resources": {"room": 1},
            "learner_resources": {"desk": 1},
        },
    }
    (folder / "config.yaml").write_text(yaml.safe_dump(config))
    (folder / "ray").mkdir()
    with machines(2, folder / "ray") as (first, second), raylets(folder, f"{first.address}:6379") as cluster:
        cluster.environment |= VARIABLES | {"RAY_TMPDIR": str(folder / "ray")}
        cluster.head("--node-ip-address", first.address, resources={"desk": 1}, inside=first.inside)
        join = ["--address", cluster.address, "--num-cpus", "2"]
        cluster.start(*join, resources={"room": 1}, inside=second.inside, RAY_AUTH_MODE="token")
        train = [sys.executable, "-m", "rlsdk", "train", str(folder / "config.yaml")]
        with (folder / "console.log").open("w") as console:
            run = subprocess.Popen(
                [*second.inside, *train], cwd=ROOT, env=cluster.environment, stdout=console, stderr=console
            )
        try:
            until(2, folder / "run", run, 300.0)
            ip(*second.port, "down")
            time.sleep(SECONDS)
            ip(*second.port, "up")
            until((folder / "run" / "metrics.jsonl").read_bytes().count(b"\n") + 5, folder / "run", run, 60.0)
            psutil.Process(run.pid).children()[0].send_signal(signal.SIGINT)  # the process in `nsenter` is its child
            assert run.wait(120.0) == 130
        finally:
            run.kill()
    assert "died" not in (folder / "console.log").read_text()
