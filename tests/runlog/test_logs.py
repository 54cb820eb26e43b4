"""The driver's log file."""

from __future__ import annotations

import io
import logging
import re
from pathlib import Path

import pytest
from rich.console import Console

from rlsdk.config import Plan, check
from rlsdk.runlog.logs import log_to


@pytest.fixture
def plan(tmp_path: Path) -> Plan:
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
    return plan


def test_the_log_of_a_driver_begins_with_run_process_and_settings(plan: Plan) -> None:
    shown = io.StringIO()
    log_to(plan, Console(file=shown), "driver.log")
    text = (plan.folder / "logs" / "driver.log").read_text()
    assert "run 'trial'" in text and "process" in text
    assert "settings: {" in text and '"max_tokens": 99' in text
    assert shown.getvalue() == ""  # a person is told no settings at the default level


def test_a_log_that_is_not_a_terminal_has_one_line_for_each_record(plan: Plan) -> None:
    shown = io.StringIO()
    log_to(plan, Console(file=shown, width=80))
    logging.getLogger("rlsdk.trial").info("waiting for the model to load; the log is %s", "/runs/" + "x" * 100)
    (line,) = shown.getvalue().splitlines()
    assert re.fullmatch(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d INFO waiting for the model .* /runs/x{100}", line)


def test_in_a_terminal_a_long_record_wraps(plan: Plan) -> None:
    shown = io.StringIO()
    log_to(plan, Console(file=shown, width=80, force_terminal=True, color_system=None))
    logging.getLogger("rlsdk.trial").info("waiting " * 20)
    assert len(shown.getvalue().splitlines()) > 2
    assert max(map(len, shown.getvalue().splitlines())) <= 80


def test_a_log_on_a_full_disk_is_reported_once_without_a_stack_trace(
    plan: Plan, capfd: pytest.CaptureFixture[str]
) -> None:
    shown, file = io.StringIO(), plan.folder / "logs" / "driver.log"
    file.symlink_to("/dev/full")
    log_to(plan, Console(file=shown), "driver.log")
    logging.getLogger("rlsdk.trial").info("step 1")
    log_to(plan, Console(file=shown))  # the next run in this process
    (told, step) = shown.getvalue().splitlines()
    assert f"{file} cannot be written: No space left on device" in told and step.endswith("step 1")
    assert capfd.readouterr().err == ""
