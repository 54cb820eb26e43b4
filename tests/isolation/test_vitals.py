"""State and activity of a process, observed from outside."""

from __future__ import annotations

import os
import sys

import psutil
import pytest

from rlsdk.isolation.vitals import identify, look


@pytest.mark.skipif(sys.platform != "linux", reason="Linux counts the start of a process from the boot")
def test_a_process_is_the_same_after_the_clock_was_set(monkeypatch: pytest.MonkeyPatch) -> None:
    before, boot = identify(os.getpid()), psutil.boot_time()
    monkeypatch.setattr(psutil._psplatform, "boot_time", lambda: boot + 3600)  # what the kernel says after `date -s`
    assert identify(os.getpid()) == before
    assert look([before], measured=False)[0].state == "running"
