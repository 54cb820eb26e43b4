"""A package written by `rlsdk new`, with rlsdk's wheel, in an environment without the source tree."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
pytestmark = pytest.mark.slow


def run(*command: str | Path, cwd: Path) -> str:
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"} | {"PIP_DISABLE_PIP_VERSION_CHECK": "1"}
    ran = subprocess.run(list(map(str, command)), cwd=cwd, env=environment, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, f"{command}\n{ran.stdout}\n{ran.stderr}"
    return ran.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    build = ("-m", "pip", "-q", "wheel", "--no-deps", "--no-build-isolation")
    run(sys.executable, *build, "-w", folder, ROOT, cwd=folder)
    return next(folder.glob("rlsdk-*.whl"))


@pytest.fixture(scope="module")
def programs(tmp_path_factory: pytest.TempPathFactory, wheel: Path) -> Path:
    """The program folder of an environment with the wheel; rlsdk's requirements come from this environment."""
    folder = tmp_path_factory.mktemp("environment")
    pip = ("-m", "pip", "-q")
    run(sys.executable, "-m", "venv", folder / "venv", cwd=folder)
    programs = folder / "venv" / "bin"
    site = run(programs / "python", "-c", "import sysconfig; print(sysconfig.get_path('purelib'))", cwd=folder).strip()
    (Path(site) / "needed.pth").write_text(sysconfig.get_path("purelib") + "\n")
    run(programs / "python", *pip, "install", "--no-deps", "--no-index", wheel, cwd=folder)
    where = run(programs / "python", "-c", "import rlsdk; print(rlsdk.__file__)", cwd=folder)
    assert where.startswith(site), where
    return programs


@pytest.mark.parametrize("kind", ["reward", "workflow", "advantage"])
def test_a_new_package_installs_passes_its_tests_and_is_checked(programs: Path, tmp_path: Path, kind: str) -> None:
    run(programs / "rlsdk", "new", kind, f"my-{kind}", cwd=tmp_path)
    package = tmp_path / f"my_{kind}"
    install = ("-m", "pip", "-q", "install", "--no-deps", "--no-build-isolation", "--no-index", ".")
    run(programs / "python", *install, cwd=package)
    assert "2 passed" in run(programs / "python", "-m", "pytest", "-q", cwd=package)
    assert "1 component" in run(programs / "rlsdk", "check", f"my_{kind}", cwd=tmp_path)


def test_the_base_is_under_a_hundred_megabytes_and_checks_a_new_package(wheel: Path, tmp_path: Path) -> None:
    run(sys.executable, "-m", "venv", tmp_path / "venv", cwd=tmp_path)
    programs, pip = tmp_path / "venv" / "bin", ("-m", "pip", "-q", "install")
    got = subprocess.run([programs / "python", *pip, wheel, "hatchling"], capture_output=True, text=True, check=False)
    if got.returncode and "No matching distribution" in got.stderr:
        pytest.skip(f"pip reaches no package index: {got.stderr}")
    assert got.returncode == 0, got.stderr
    size = """
from importlib.metadata import distributions
bare = [d for d in distributions() if d.metadata["Name"] not in ("pip", "setuptools")]
files = [f.locate() for d in bare for f in d.files or () if f.suffix != ".pyc"]
print(sum(f.stat().st_size for f in files if f.is_file()))
"""
    assert int(run(programs / "python", "-c", size, cwd=tmp_path)) < 100e6
    run(programs / "rlsdk", "new", "reward", "mine", cwd=tmp_path)
    install = ("--no-deps", "--no-build-isolation", "--no-index", ".")
    run(programs / "python", *pip, *install, cwd=tmp_path / "mine")
    assert "0 failed" in run(programs / "rlsdk", "check", "mine", cwd=tmp_path)
