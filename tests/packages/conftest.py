"""Plugin packages installed by pip into a separate environment."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.warm import WarmPython

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
Install = Callable[..., dict[str, str]]
Rlsdk = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture(scope="session")
def install(tmp_path_factory: pytest.TempPathFactory) -> Install:
    """Install packages; return the environment variables of a process that has them in addition to this Python's."""

    def run(*packages: Path) -> dict[str, str]:
        built, site = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("site")
        for package in packages:
            shutil.copytree(package, built / package.name)  # so that nothing is built into the working tree
        pip = [sys.executable, "-m", "pip", "install", "-qq", "--no-deps", "--no-build-isolation", "--target"]
        sources = [str(path) for path in sorted(built.iterdir())]
        quiet = {**os.environ, "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
        subprocess.run([*pip, str(site), *sources], check=True, env=quiet)
        path = [str(site), str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
        return {**os.environ, "PYTHONPATH": os.pathsep.join(path)}

    return run


@pytest.fixture(scope="session")
def environment(install: Install) -> dict[str, str]:
    """An environment with the packages of two labs."""
    return install(HERE / "rlsdk-mylab", HERE / "rlsdk-otherlab")


@pytest.fixture(scope="module")
def warm(environment: dict[str, str]) -> Iterator[WarmPython]:
    """Run modules in that environment, in forks of one process."""
    process = WarmPython(environment)
    yield process
    process.close()


@pytest.fixture
def rlsdk(warm: WarmPython, environment: dict[str, str], tmp_path: Path) -> Rlsdk:
    """Run the command `rlsdk` in that environment, in a folder of the test, and check its exit status."""

    def run(*arguments: str | Path, status: int = 0, fresh: bool = False) -> subprocess.CompletedProcess[str]:
        if fresh:  # a process of its own, as in a shell
            command = [sys.executable, "-m", "rlsdk.cli", *map(str, arguments)]
            ran = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=environment, check=False)
        else:
            ran = warm.run("rlsdk.cli", *arguments, cwd=tmp_path)
        assert ran.returncode == status, f"{ran.stdout}\n{ran.stderr}"
        return ran

    return run
