"""A package of `rlsdk new` beside the built wheel of rlsdk, in an environment that has no source tree."""

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
def programs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of programs of an environment with the wheel; what rlsdk needs comes from this environment."""
    folder = tmp_path_factory.mktemp("wheel")
    pip = ("-m", "pip", "-q")
    run(sys.executable, *pip, "wheel", "--no-deps", "--no-build-isolation", "-w", folder, ROOT, cwd=folder)
    run(sys.executable, "-m", "venv", folder / "venv", cwd=folder)
    programs = folder / "venv" / "bin"
    site = run(programs / "python", "-c", "import sysconfig; print(sysconfig.get_path('purelib'))", cwd=folder).strip()
    (Path(site) / "needed.pth").write_text(sysconfig.get_path("purelib") + "\n")
    run(programs / "python", *pip, "install", "--no-deps", "--no-index", *folder.glob("rlsdk-*.whl"), cwd=folder)
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
    assert "1 components" in run(programs / "rlsdk", "check", f"my_{kind}", cwd=tmp_path)
