"""No process that a run started outlives it."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

ORPHAN = """
import subprocess
quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
child = subprocess.Popen(["sleep", "300"], start_new_session=True, **quiet)
print(child.pid)
"""
DRIVER = """
import subprocess, sys, time
from rlsdk.isolation.reaper import marked_early, reaped
with marked_early():
    print(subprocess.Popen(["sleep", "300"], start_new_session=True, stdout=subprocess.DEVNULL).pid, flush=True)
subprocess.run([sys.executable, "-c", "import os; assert 'RLSDK_RUN_MARK' not in os.environ"], check=True)
with reaped():
    # a grandchild whose parent is gone, as Ray's agents are
    print(subprocess.run([sys.executable, "-c", {orphan!r}], capture_output=True, text=True).stdout.strip(), flush=True)
    {then}
"""


@pytest.mark.parametrize("killed", [True, False])
def test_what_a_driver_started_ends_with_it(killed: bool) -> None:
    then = "time.sleep(300)" if killed else "pass"
    driver = subprocess.Popen(
        [sys.executable, "-c", DRIVER.format(orphan=ORPHAN, then=then)], stdout=subprocess.PIPE, text=True
    )
    assert driver.stdout is not None
    orphans = [psutil.Process(int(driver.stdout.readline())) for _ in range(2)]
    if killed:
        assert all(orphan.is_running() for orphan in orphans)
        driver.send_signal(signal.SIGKILL)
    driver.wait(30)
    end = time.monotonic() + 15
    while alive(orphans) and time.monotonic() < end:
        time.sleep(0.1)
    assert not alive(orphans)


SHARING = '''
import multiprocessing.shared_memory, subprocess, sys, time
from rlsdk.isolation.reaper import reaped
CHILD = """
import time
from multiprocessing.shared_memory import SharedMemory
memory = SharedMemory(create=True, size=9)
print(memory.name, flush=True)
time.sleep(300)
"""
with reaped():
    child = subprocess.Popen([sys.executable, "-c", CHILD], start_new_session=True, stdout=subprocess.PIPE, text=True)
    print(child.stdout.readline(), flush=True)
    time.sleep(300)
'''


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux shows shared memory as files")
def test_shared_memory_of_a_killed_run_is_deleted() -> None:
    driver = subprocess.Popen([sys.executable, "-c", SHARING], stdout=subprocess.PIPE, text=True)
    assert driver.stdout is not None
    memory = Path("/dev/shm", driver.stdout.readline().strip().lstrip("/"))
    assert memory.is_file()
    driver.kill()
    driver.communicate()
    end = time.monotonic() + 15
    while memory.exists() and time.monotonic() < end:
        time.sleep(0.1)
    assert not memory.exists()


def alive(processes: list[psutil.Process]) -> list[psutil.Process]:
    return [each for each in processes if each.is_running() and each.status() != psutil.STATUS_ZOMBIE]
