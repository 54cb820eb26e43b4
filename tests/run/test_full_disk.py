"""A disk that is really full: a small file system, filled while the run trains."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.stack, pytest.mark.slow]
FILLER = """
import os
import rlsdk

@rlsdk.shaping("filler")
def filler(x):
    '''Rewards as they are; the third step waits while the disk is filled.'''
    while x.train_step == 2 and os.environ["FILL"]:
        free = os.statvfs(os.environ["FILL"])
        with open(os.path.join(os.environ["FILL"], "filler"), "wb") as file:
            try:
                os.posix_fallocate(file.fileno(), 0, free.f_bavail * free.f_frsize - 200_000)
            except OSError:  # the run has written meanwhile
                continue
        break
    return x.rewards
"""
NAMESPACE = ["unshare", "--map-root-user", "--mount"]


def test_a_full_disk_keeps_the_last_checkpoint_and_the_run_continues_once_there_is_space(
    runner: Any, tmp_path: Path
) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = f"mount -t tmpfs -o size=512m tmpfs {shlex.quote(str(disk))}"
    if subprocess.run([*NAMESPACE, "sh", "-c", mount], capture_output=True, check=False).returncode:
        pytest.skip("this kernel lets no user mount a file system")
    plugin = tmp_path / "filler.py"
    plugin.write_text(FILLER)
    settings = [f"out={disk}", "steps=6", "checkpoint.every=2", "checkpoint.export=never", "engine=transformers"]
    settings += ["algorithm.shaping=[filler/filler]"]
    train = shlex.join([sys.executable, "-m", "rlsdk.cli", "train", str(runner.config), *settings])
    train += f" --plugin {shlex.quote(str(plugin))}"
    script = f"""
        {mount} || exit 99
        cd {shlex.quote(str(disk))}
        FILL=$PWD {train} > {tmp_path}/first 2>&1; echo $? > {tmp_path}/status
        ls -A run/checkpoints > {tmp_path}/kept
        rm filler
        FILL= {train} --resume > {tmp_path}/second 2>&1; echo $? >> {tmp_path}/status
        ls -A run/checkpoints >> {tmp_path}/kept
        cp run/metrics.jsonl {tmp_path}/metrics.jsonl
    """
    subprocess.run([*NAMESPACE, "sh", "-c", script], check=True, timeout=300)
    said = " ".join((tmp_path / "first").read_text().split())
    assert (tmp_path / "status").read_text().split() == ["1", "0"], said + (tmp_path / "second").read_text()
    assert re.search(r"the disk is full \(.* free\); the checkpoint of step 2 is kept", said)
    assert "Traceback" not in said
    assert "then continue with --resume" in said
    assert (tmp_path / "kept").read_text().split()[0] == "step-2"
    assert (tmp_path / "kept").read_text().split()[1:] == ["step-4", "step-6"]
    assert (tmp_path / "metrics.jsonl").read_text().count("\n") == 7  # one more for the evaluation before
