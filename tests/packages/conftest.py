"""Plugin packages installed by pip into a separate environment."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

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


def components_of(plugin: str, library: str, environment: dict[str, str], folder: Path) -> set[tuple[str, str]]:
    """Kinds and names of what `rlsdk plugins` lists of a plugin, in a process that must not import its library."""
    code = (
        "import sys; from rlsdk.cli import root\n"
        f"root(['plugins', {plugin!r}, '--json'], standalone_mode=False)\n"
        f"print('IMPORTED', {library!r} in sys.modules)"
    )
    command = [sys.executable, "-c", code]
    ran = subprocess.run(command, capture_output=True, text=True, check=True, env=environment, cwd=folder)
    shown, _, imported = ran.stdout.partition("IMPORTED")
    found = json.loads(shown)
    assert found["broken"] == []
    assert imported.strip() == "False"
    return {(each["kind"], each["name"]) for each in found["components"]}


def write_config(folder: Path, config: dict[str, Any], **model: Any) -> Path:
    """Write a configuration whose model is a folder with nothing but an empty config.json; return its file."""
    path = folder / "model"
    path.mkdir()
    (path / "config.json").write_text("{}")
    file = folder / "config.yaml"
    file.write_text(yaml.safe_dump({**config, "model": {"path": str(path), **model}}))
    return file


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
