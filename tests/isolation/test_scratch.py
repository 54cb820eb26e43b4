"""Temporary folders of killed programs are deleted by the next one."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from rlsdk.isolation.scratch import scratch_folder

HOLDER = """
import sys, time
from rlsdk.isolation.scratch import scratch_folder
with scratch_folder("model-", sys.argv[1]) as folder:
    (folder / "weights").touch()
    print(folder, flush=True)
    time.sleep(300)
"""


def test_what_a_killed_program_left_is_deleted_and_what_others_use_is_not(tmp_path: Path) -> None:
    holders = [
        subprocess.Popen([sys.executable, "-c", HOLDER, str(tmp_path)], stdout=subprocess.PIPE, text=True)
        for _ in range(3)
    ]
    try:
        used, left, new = (Path(holder.stdout.readline().strip()) for holder in holders if holder.stdout)
        for holder in holders[1:]:
            holder.kill()
            holder.wait()
        (tmp_path / "other-1").mkdir()
        (tmp_path / "model-2").symlink_to(tmp_path / "other-1")
        for folder in (used, left, tmp_path / "other-1"):
            os.utime(folder, (0, 0))
        with scratch_folder("model-", tmp_path) as own:
            there = {path.name for path in tmp_path.iterdir()}
            assert there == {own.name, used.name, new.name, "other-1", "model-2"}
        assert not own.exists() and (used / "weights").exists()
    finally:
        for holder in holders:
            holder.kill()
            holder.communicate()
