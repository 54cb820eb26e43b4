"""The process of a rollout worker."""

from __future__ import annotations

import subprocess
import sys

CODE = """
import logging
from rlsdk.workers.actor import RolloutWorkerActor
RolloutWorkerActor("")
logging.getLogger("httpx").info("HTTP Request: POST http://127.0.0.1:1/secret/v1")
logging.getLogger("my_agent").info("a search took 3 s")
"""


def test_its_log_has_what_users_log_and_no_line_for_each_request_of_an_agent() -> None:
    done = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, check=True)
    assert done.stderr.endswith("INFO a search took 3 s\n")
    assert "secret" not in done.stderr
