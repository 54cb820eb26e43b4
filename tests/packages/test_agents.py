"""The OpenAI Agents SDK itself, in a separate folder: the plugin's tests, its listing, a config that names it.

It asks for a release of websockets that conflicts with vLLM's, and so is installed without its requirements, which
vLLM brings. That takes a network.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PLUGIN = ROOT / "plugins" / "rlsdk-agents"

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def environment(install, tmp_path_factory) -> dict[str, str]:
    """An environment with the plugin and the library."""
    made, folder = install(PLUGIN), tmp_path_factory.mktemp("agents")
    pip = [sys.executable, "-m", "pip", "install", "-qq", "--disable-pip-version-check", "--no-deps", "--target"]
    subprocess.run([*pip, str(folder), "openai-agents==0.24.0"], check=True)
    path = os.pathsep.join([made["PYTHONPATH"], str(folder)])
    return {**made, "PYTHONPATH": path, "PYTEST_ADDOPTS": ""}  # those of the outer pytest


def test_the_tests_of_the_plugin_pass_where_the_library_is(environment):
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(PLUGIN / "tests")]
    ran = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=ROOT, check=False)
    assert ran.returncode == 0, ran.stdout
    assert re.match(r"\d+ passed in", ran.stdout.splitlines()[-1]), ran.stdout  # none was skipped


def test_it_is_listed_with_its_options(rlsdk):
    found = json.loads(rlsdk("plugins", "agents", "--json").stdout)
    assert found["broken"] == []
    (component,) = found["components"]
    assert (component["kind"], component["name"]) == ("workflow", "agents/workflow")
    assert {option["name"] for option in component["options"]} >= {"agent", "parser", "max_turns", "timeout"}
