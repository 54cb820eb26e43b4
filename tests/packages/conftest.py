"""Two packages of other people, installed by pip into an environment of their own beside this one."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
Rlsdk = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture(scope="session")
def environment(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Environment variables under which a process has this Python's packages and the two plugins."""
    built, site = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("site")
    for package in ("rlsdk-mylab", "rlsdk-otherlab"):
        shutil.copytree(HERE / package, built / package)  # so that nothing is built into the working tree
    pip = [sys.executable, "-m", "pip", "install", "-qq", "--no-deps", "--no-build-isolation", "--target", str(site)]
    sources = [str(path) for path in sorted(built.iterdir())]
    subprocess.run([*pip, *sources], check=True, env={**os.environ, "PIP_DISABLE_PIP_VERSION_CHECK": "1"})
    path = [str(site), str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(path)}


@pytest.fixture
def rlsdk(environment: dict[str, str], tmp_path: Path) -> Rlsdk:
    """Runs the command `rlsdk` in that environment, in a folder of the test; checks its exit status."""

    def run(*arguments: str | Path, status: int = 0, timeout: float = 60) -> subprocess.CompletedProcess[str]:
        command: Sequence[str] = [sys.executable, "-m", "rlsdk.cli", *map(str, arguments)]
        ran = subprocess.run(
            command, capture_output=True, text=True, cwd=tmp_path, env=environment, timeout=timeout, check=False
        )
        assert ran.returncode == status, f"{ran.stdout}\n{ran.stderr}"
        return ran

    return run
