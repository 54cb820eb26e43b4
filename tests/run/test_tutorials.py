"""Tutorials, run as a reader would type them: titled blocks are files, `sh` blocks are commands, in order."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from tests.unit.test_metrics_page import undocumented

ROOT = Path(__file__).parents[2]
pytestmark = [pytest.mark.stack, pytest.mark.slow, pytest.mark.timeout(900)]


PROGRAMS = {"rlsdk": "-m rlsdk.cli", "python": "", "pytest": "-m pytest -p no:cacheprovider -c /dev/null"}


def follow(page: str, folder: Path, *, until: str = "\n## On a larger scale", python: str = sys.executable) -> None:
    """Write the files and type the commands of a page in a folder that has the repository's examples."""
    (folder / "examples").symlink_to(ROOT / "examples")
    programs = folder / "bin"
    programs.mkdir()
    for name, command in PROGRAMS.items():
        (programs / name).write_text(f'#!/bin/sh\nexec {python} {command} "$@"\n')
    # As in an environment that has rlsdk and hatchling: nothing is fetched.
    pip = f'command=$1; shift\nexec {python} -m pip -q "$command" --no-deps --no-build-isolation --no-index "$@"\n'
    (programs / "pip").write_text(f"#!/bin/sh\n{pip}")
    for program in programs.iterdir():
        program.chmod(0o755)
    environment = {
        **os.environ,
        "PATH": f"{programs}:{os.environ['PATH']}",
        "PYTHONPATH": os.pathsep.join([str(ROOT), str(folder)]),
        "OMP_NUM_THREADS": "1",
    }
    text = (ROOT / page).read_text().split(until)[0]
    for language, title, body in re.findall(r'^```(\w+)(?: title="(.*?)")?\n(.*?)^```', text, re.DOTALL | re.MULTILINE):
        if title:
            (folder / title).write_text(body)
        elif language == "sh":
            shell = ["sh", "-ec", body]
            ran = subprocess.run(shell, cwd=folder, env=environment, capture_output=True, text=True, check=False)
            assert ran.returncode == 0, f"{body}\n{ran.stdout[-2000:]}\n{ran.stderr[-4000:]}"


def test_my_model_on_my_data(tmp_path: Path) -> None:
    follow("docs/howto/train.md", tmp_path)
    summary = json.loads((tmp_path / "runs" / "mine" / "summary.json").read_text())
    assert summary["accuracy_after"]["sampled"] > summary["accuracy_before"]["sampled"] + 0.05
    lines = (tmp_path / "runs" / "mine" / "metrics.jsonl").read_text().splitlines()
    assert undocumented({key for line in lines for key in json.loads(line)} - {"step"}) == []
    assert (tmp_path / "trained" / "config.json").is_file()


def test_from_an_empty_folder_to_a_plugin(tmp_path: Path) -> None:
    """The package is installed into a separate environment, which sees the packages installed here."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", tmp_path / "venv"], check=True)
    (site,) = (tmp_path / "venv").glob("lib/python*/site-packages")
    (site / "here.pth").write_text(f"import site; site.addsitedir({sysconfig.get_path('purelib')!r})\n")
    follow("docs/howto/first_plugin.md", tmp_path, python=str(tmp_path / "venv" / "bin" / "python"))
    run = tmp_path / "brief" / "runs" / "brief"
    rewards = [json.loads(line).get("reward/mean") for line in (run / "metrics.jsonl").read_text().splitlines()]
    curve = [reward for reward in rewards if reward is not None]
    assert len(curve) == 20 and sum(curve[-5:]) > sum(curve[:5])
    assert (run / "curves.png").is_file() and (run / "report.html").is_file()
    assert json.loads((run / "summary.json").read_text())["status"] == "finished"
