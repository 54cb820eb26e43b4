"""Python stacks that a process writes when another one asks."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import attrs
import pytest

from rlsdk.isolation import vitals
from rlsdk.isolation.vitals import Identity

BUSY = """
import threading
from pathlib import Path
from rlsdk.isolation.vitals import identity

def spin():
    while not Path("/dev/null").with_name("none").exists():
        pass

for _ in range(2):
    threading.Thread(target=spin).start()
identity()
print("up", flush=True)
"""
LOCKED = """
import ctypes
from rlsdk.isolation.vitals import identity

sleep = ctypes.PyDLL(None).sleep  # a PyDLL keeps Python's lock
identity()
print("up", flush=True)
sleep(600)
"""
FORKED = """
import os, time
from rlsdk.isolation.vitals import identity

identity()
if os.fork():
    os.wait()
else:
    identity()
    print(os.getpid(), flush=True)
    time.sleep(600)
"""


@contextmanager
def child(code: str, log: Path) -> Iterator[tuple[subprocess.Popen[bytes], Identity]]:
    with log.open("w") as file, subprocess.Popen([sys.executable, "-c", code], stdout=-1, stderr=file) as process:
        try:
            assert process.stdout is not None
            said = process.stdout.readline()
            pid = process.pid if said == b"up\n" else int(said)
            yield process, attrs.evolve(vitals.identify(pid), stacks=True)
        finally:
            process.kill()


def written(log: Path, count: int = 1) -> str:
    end = time.monotonic() + 30
    while (text := log.read_text()).count("Current thread") < count and time.monotonic() < end:
        time.sleep(0.005)
    return text


def test_a_process_whose_threads_run_survives_writing_their_stacks(tmp_path: Path) -> None:
    with child(BUSY, tmp_path / "log") as (process, known):
        for _ in range(100):
            assert vitals.write_stacks(known)
        text = written(tmp_path / "log", 100)
        assert process.poll() is None, text[-2000:]
    assert text.count("in spin") == 200 and "Fatal" not in text


def test_stacks_are_written_although_code_that_is_not_python_keeps_the_lock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rlsdk.isolation.vitals.ANSWER_SECONDS", 0.2)
    with child(LOCKED, tmp_path / "log") as (process, known):
        time.sleep(0.2)  # for the call to begin
        assert vitals.write_stacks(known)
        assert 'File "<string>", line 8 in <module>' in written(tmp_path / "log")
        assert process.poll() is None


def test_a_fork_writes_its_own_stacks(tmp_path: Path) -> None:
    with child(FORKED, tmp_path / "log") as (_, known):
        assert vitals.write_stacks(known)
        assert 'File "<string>", line ' in written(tmp_path / "log")
        vitals.kill(known)
