"""The driver's log file."""

from __future__ import annotations

import contextlib
import fcntl
import io
import logging
import os
import pty
import re
import struct
import subprocess
import sys
import termios
import threading
from pathlib import Path

import pytest
from rich.console import Console

from rlsdk.config import Plan, check
from rlsdk.contracts.rollouts import TaskCounts
from rlsdk.runlog import logs
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


def test_a_plain_line_says_the_time_left_at_the_pace_since_the_start(monkeypatch):
    now = 100.0
    monkeypatch.setattr(logs.time, "monotonic", lambda: now)
    written = io.StringIO()
    line = logs.ProgressLine(Console(file=written, width=120), total=50, done=10)
    now = 130.0  # ten steps in 30 s; thirty are left
    line.update(20, {"reward/mean": 0.5, "accuracy/mean": 0.25})
    line.update(25, {"reward/mean": 0.9})
    line.update(50, {})
    assert written.getvalue().splitlines() == [
        "step 20/50  reward 0.500  accuracy 25.0%  left 0:01:30",
        "step 25/50  reward 0.900  left 0:00:50",
        "step 50/50  left 0:00:00",
    ]


COUNTS = {
    "countdown": TaskCounts(target=1280, available=3, scheduled=128, filtered=17, expired=2),
    "jsonl": TaskCounts(target=64, scheduled=6),
}
LINES = [
    "countdown  available 3  in flight 128  filtered 17  stale 2",
    "jsonl      in flight 6",
]


def test_without_a_terminal_a_step_is_one_line_with_the_counts_of_each_source():
    written = io.StringIO()
    line = logs.ProgressLine(Console(file=written, width=40), 10, 10, lambda: COUNTS)
    line.update(10, {"reward/mean": 0.5})
    assert written.getvalue() == (
        "step 10/10  reward 0.500  left 0:00:00"
        "  countdown: available 3  in flight 128  filtered 17  stale 2  jsonl: in flight 6\n"
    )


def test_a_reader_that_is_gone_and_a_full_disk_do_not_end_the_run(monkeypatch, caplog):
    reading, writing = os.pipe()
    os.close(reading)
    for descriptor in (writing, os.open("/dev/full", os.O_WRONLY)):
        output = os.fdopen(descriptor, "w", buffering=1)
        monkeypatch.setattr(sys, "stderr", output)
        line = logs.ProgressLine(logs.log_console(), 10, 0)
        line.update(1, {})
        line.update(2, {})
        with contextlib.suppress(OSError):
            output.close()
    assert caplog.text.count("standard error is closed") == 1


def test_the_only_source_is_not_named():
    written = io.StringIO()
    line = logs.ProgressLine(Console(file=written, width=40), 10, 10, lambda: {"sums": TaskCounts(filtered=4)})
    line.update(10, {})
    assert written.getvalue() == "step 10/10  left 0:00:00  filtered 4\n"


def test_a_source_without_counts_is_omitted():
    written = io.StringIO()
    line = logs.ProgressLine(
        Console(file=written, width=80), 10, 0, lambda: {"countdown": TaskCounts(target=64, trained=64)}
    )
    line.update(1, {})
    assert written.getvalue() == "step 1/10  left 0:00:00\n"


METRICS = {"reward/mean": 0.512, "accuracy/mean": 0.5, "actor/loss": -0.0123, "time/tokens_per_second": 12_345.0}


@pytest.mark.parametrize("width", [50, 80, 120])
def test_in_a_terminal_step_and_time_never_vanish(width):
    script = (
        "import json, sys\n"
        "from rlsdk.runlog.logs import ProgressLine, log_console\n"
        "line = ProgressLine(log_console(), 12000, 0)\n"
        f"line.update(11999, {METRICS!r})\n"
        "line.close()\n"
    )
    shown = in_terminal([sys.executable, "-c", script], width)
    last = [text for text in shown.replace("\r", "\n").splitlines() if "11999/12000" in text][-1]
    assert len(last) <= width
    assert re.search(r"step\s+11999/12000 .*\d:\d\d:\d\d left \S+$", last.rstrip())
    assert ("reward 0.512" in last) == (width >= 80)
    assert ("tokens/s" in last) == (width >= 120)
    assert "…" not in last


def in_terminal(command, width):
    """Output of a command to a terminal of this width, without control codes."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, width, 0, 0))
    unset = {key: value for key, value in os.environ.items() if key not in ("COLUMNS", "LINES", "NO_COLOR")}
    process = subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs, env={**unset, "TERM": "xterm"})
    os.close(theirs)
    written = b""
    while True:
        try:
            read = os.read(ours, 65536)
        except OSError:  # Linux says so when the other side is closed
            break
        if not read:
            break
        written += read
    assert process.wait() == 0
    os.close(ours)
    return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", written.decode())


def test_in_a_terminal_the_sources_are_drawn_as_they_stand_while_the_trainer_waits():
    drawn = threading.Event()

    class Screen(io.StringIO):
        def write(self, text: str) -> int:
            if "available 7" in text:
                drawn.set()
            return super().write(text)

    written = Screen()
    console = Console(file=written, width=120, force_terminal=True, color_system=None, legacy_windows=False)
    counts = dict(COUNTS)
    line = logs.ProgressLine(console, 10, 0, lambda: counts)
    line.update(1, {})
    counts["jsonl"] = TaskCounts(target=64, available=7)
    assert drawn.wait(20)  # nobody updates it: it draws itself
    line.close()
    assert all(text in written.getvalue() for text in LINES)


def test_the_log_goes_on_after_code_of_a_plugin_has_closed_standard_error(tmp_path: Path) -> None:
    code = """
import logging, sys
from rlsdk.runlog.logs import _handler, log_console
console = log_console()
logging.getLogger("rlsdk").addHandler(_handler(console))
sys.stderr.close()
logging.getLogger("rlsdk.trial").warning("a warning")
sys.stderr.close()
console.print("a line")
"""
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert re.fullmatch(r"\S+ \S+ WARNING a warning\na line\n", ran.stderr)
