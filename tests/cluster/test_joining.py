"""A cluster started by `ray start` on two "machines", as in docs/howto/cluster.md: token, packages, training."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.stack, pytest.mark.slow, pytest.mark.timeout(900)]
ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def found() -> Iterator[dict[str, Any]]:
    """Results of `joining.py`, in a folder with a short name, as socket paths require."""
    folder = tempfile.mkdtemp(prefix="rj-", dir="/tmp")
    command = [sys.executable, "-m", "tests.cluster.joining", folder]
    ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=840, check=False)
    assert ran.returncode == 0, ran.stderr[-4000:]
    yield json.loads(ran.stdout.strip().splitlines()[-1])
    shutil.rmtree(folder, ignore_errors=True)


def test_a_machine_without_the_token_gets_the_file_to_copy(found: dict[str, Any]) -> None:
    assert "requires a token, and " in found["no_token"]
    assert "/.ray/auth_token does not exist: copy the first machine's token" in found["no_token"]


def test_a_node_without_the_plugin_is_named_with_the_command(found: dict[str, Any]) -> None:
    head, line = found["no_plugin"].splitlines()
    assert head == "the nodes of the cluster differ from this machine:"
    assert line.endswith("rlsdk-lab is missing (0.3 here); run there: pip install rlsdk-lab==0.3")


def test_engine_and_learner_train_on_a_machine_each(found: dict[str, Any]) -> None:
    assert (found["status"], found["steps"]) == ("finished", 3)
    assert found["engines"]["lost"] == 0 and found["tasks"]["failed"] == 0
