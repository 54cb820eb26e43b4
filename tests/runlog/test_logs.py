"""The file that the driver logs to."""

from __future__ import annotations

import io
from pathlib import Path

from rich.console import Console

from rlsdk.config import check
from rlsdk.runlog.logs import log_to


def test_the_log_of_a_driver_begins_with_run_process_and_settings(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    config = {
        "name": "trial",
        "out": str(tmp_path),
        "model": str(tmp_path / "model"),
        "tasks": {"train": {"use": "countdown", "size": 100}},
        "reward": "countdown",
        "steps": 2,
        "sampling": {"max_tokens": 99},
    }
    plan = check(config)
    (plan.folder / "logs").mkdir(parents=True)
    shown = io.StringIO()
    log_to(plan, Console(file=shown), "driver.log")
    text = (plan.folder / "logs" / "driver.log").read_text()
    assert "run 'trial'" in text and "process" in text
    assert "settings: {" in text and '"max_tokens": 99' in text
    assert shown.getvalue() == ""  # a person is told no settings at the default level
