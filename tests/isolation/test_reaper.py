"""No process that a run started outlives it."""

from __future__ import annotations

import signal
import subprocess
import sys
import time

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
from rlsdk.isolation.reaper import reaped
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
    orphan = psutil.Process(int(driver.stdout.readline()))
    if killed:
        assert orphan.is_running()
        driver.send_signal(signal.SIGKILL)
    driver.wait(30)
    end = time.monotonic() + 15
    while orphan.is_running() and orphan.status() != psutil.STATUS_ZOMBIE and time.monotonic() < end:
        time.sleep(0.1)
    assert not orphan.is_running() or orphan.status() == psutil.STATUS_ZOMBIE
