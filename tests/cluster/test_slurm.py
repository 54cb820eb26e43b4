"""The batch script for Slurm, with stand-ins for `srun` and `scontrol` that run everything on this machine."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import yaml

from tests.run.conftest import CONFIG

SCRIPT = Path(__file__).resolve().parents[2] / "examples" / "cluster" / "slurm.sh"
SCONTROL = """#!/bin/sh
test "$*" = "show hostnames node[1-2]" && printf '127.0.0.1\\nlocalhost\\n'
"""
SRUN = """#!/bin/bash
echo "$@" >> "$SRUN_LOG"
while [[ $1 == --* ]]; do case $1 in --overlap) shift ;; *) shift 2 ;; esac; done
[[ $2 == start ]] && set -- "$@" --num-cpus 2
exec "$@"
"""
FAKE_RLSDK = """#!/bin/bash
echo "$@" > "$RLSDK_LOG"
trap 'sleep 1; echo saved >> "$RLSDK_LOG"; exit 130' TERM
for _ in $(seq 600); do sleep 0.1; done
"""
FAKE_RAY = """#!/bin/bash
[[ $1 == health-check ]] && exit 0
trap 'exit 0' TERM
while true; do sleep 0.1; done
"""


@pytest.fixture
def job() -> Iterator[dict[str, str]]:
    """Environment of a job of two nodes, in a folder with a short name, as paths of sockets must have."""
    with tempfile.TemporaryDirectory(prefix="rs-", dir="/tmp", ignore_cleanup_errors=True) as name:
        folder = Path(name)
        (folder / "bin").mkdir()
        (folder / "home").mkdir()
        write(folder / "bin" / "scontrol", SCONTROL)
        write(folder / "bin" / "srun", SRUN)
        yield {
            **{key: value for key, value in os.environ.items() if not key.startswith("RAY_")},
            "HOME": str(folder / "home"),
            "PATH": os.pathsep.join([str(folder / "bin"), str(Path(sys.executable).parent), os.environ["PATH"]]),
            "RAY_TMPDIR": name,
            "RLSDK_LOG": str(folder / "rlsdk.log"),
            "SLURM_JOB_ID": str(os.getpid()),
            "SLURM_JOB_NODELIST": "node[1-2]",
            "SRUN_LOG": str(folder / "srun.log"),
        }


def write(path: Path, text: str) -> None:
    """Write a program."""
    path.write_text(text)
    path.chmod(0o755)


def started_by(process: subprocess.Popen[str]) -> list[psutil.Process]:
    """Processes of a job's session that still run."""
    found = []
    for each in psutil.process_iter(["status"]):
        try:
            if os.getsid(each.pid) == process.pid and each.info["status"] != psutil.STATUS_ZOMBIE:
                found.append(each)
        except (psutil.NoSuchProcess, ProcessLookupError):
            continue
    return found


def assert_all_ended(process: subprocess.Popen[str]) -> None:
    """Wait until nothing that a job started runs any more."""
    end = time.monotonic() + 30
    while started_by(process) and time.monotonic() < end:
        time.sleep(0.2)
    assert not started_by(process)


def test_sigterm_reaches_the_driver_and_its_status_is_the_jobs(job: dict[str, str]) -> None:
    folder = Path(job["RAY_TMPDIR"])
    write(folder / "bin" / "rlsdk", FAKE_RLSDK)
    write(folder / "bin" / "ray", FAKE_RAY)
    write(folder / "bin" / "python", f'#!/bin/sh\n[ "$1" = - ] || exec {sys.executable} "$@"\n')  # no nodes to wait for
    command = ["bash", str(SCRIPT), "config.yaml", "steps=2"]
    process = subprocess.Popen(command, env=job, text=True, start_new_session=True)
    try:
        log = folder / "rlsdk.log"
        end = time.monotonic() + 60
        while not log.is_file():
            assert time.monotonic() < end and process.poll() is None
            time.sleep(0.05)
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 130
        asked, saved = log.read_text().splitlines()
        port = 20_000 + int(job["SLURM_JOB_ID"]) % 10_000
        assert asked == f"train config.yaml steps=2 placement.ray=127.0.0.1:{port} --resume"
        assert saved == "saved"
        # Nobody waits for the nodes here, so either may come first.
        head, other = sorted((folder / "srun.log").read_text().splitlines(), key=lambda line: "--head" not in line)
        assert head.startswith(f"--overlap --nodes 1 --ntasks 1 --nodelist 127.0.0.1 ray start --head --port {port} ")
        assert other.endswith(f"--nodelist localhost ray start --address 127.0.0.1:{port} --block")
        assert not list((folder / "home").iterdir())  # the token is gone
        assert_all_ended(process)
    finally:
        for each in started_by(process):
            each.kill()


@pytest.mark.stack
@pytest.mark.slow
@pytest.mark.long
@pytest.mark.timeout(600)
def test_the_script_trains_on_two_nodes_and_leaves_nothing_running(job: dict[str, str]) -> None:
    folder = Path(job["RAY_TMPDIR"])
    write(folder / "bin" / "rlsdk", f'#!/bin/sh\nexec {sys.executable} -m rlsdk.cli "$@"\n')
    model = Path(__file__).parents[2] / "examples" / "models" / "countdown-nano"
    config = CONFIG | {"out": str(folder), "model": {"path": str(model), "max_length": 32}, "steps": 2}
    (folder / "config.yaml").write_text(yaml.safe_dump(config | {"engine": "transformers", "eval": {"before": False}}))
    command = ["bash", str(SCRIPT), str(folder / "config.yaml"), "eval.after=false"]
    process = subprocess.Popen(
        command, env=job, text=True, start_new_session=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    try:
        said, _ = process.communicate(timeout=500)
        assert process.returncode == 0, said[-3000:]
        assert json.loads((folder / "run" / "summary.json").read_text())["steps"] == 2
        assert not list((folder / "home").glob(".rlsdk-job-*"))
        assert_all_ended(process)
    finally:
        for each in started_by(process):
            each.kill()
