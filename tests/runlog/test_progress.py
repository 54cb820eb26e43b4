"""The progress line, in a terminal and outside of one."""

from __future__ import annotations

import io
import threading

from rich.console import Console

from rlsdk.contracts.rollouts import TaskCounts
from rlsdk.runlog import progress


def test_a_plain_line_says_the_time_left_at_the_pace_since_the_start(monkeypatch):
    now = 100.0
    monkeypatch.setattr(progress.time, "monotonic", lambda: now)
    written = io.StringIO()
    line = progress.ProgressLine(Console(file=written, width=120), total=50, done=10, every=10)
    now = 130.0  # ten steps in 30 s; thirty are left
    line.update(20, {"reward/mean": 0.5, "accuracy/mean": 0.25})
    line.update(25, {"reward/mean": 0.9})
    line.update(50, {})
    assert written.getvalue().splitlines() == [
        "step 20/50  reward 0.500  accuracy 25.0%  left 0:01:30",
        "step 50/50  left 0:00:00",
    ]


COUNTS = {
    "countdown": TaskCounts(target=1280, available=3, scheduled=128, filtered=17, expired=2),
    "jsonl": TaskCounts(target=64, scheduled=6),
}
LINES = [
    "countdown  target 1,280  available 3  in flight 128  filtered 17  stale 2",
    "jsonl      target 64  available 0  in flight 6  filtered 0  stale 0",
]


def test_each_source_has_a_line_where_there_is_no_terminal():
    written = io.StringIO()
    line = progress.ProgressLine(Console(file=written, width=40), 10, 0, 5, lambda: COUNTS)
    for step in range(1, 11):
        line.update(step, {"reward/mean": 0.5})
    shown = written.getvalue().splitlines()
    assert [text for text in shown if not text.startswith("step")] == [f"  {text}" for text in LINES * 2]


def test_in_a_terminal_the_sources_are_drawn_as_they_stand_while_the_trainer_waits():
    drawn = threading.Event()

    class Screen(io.StringIO):
        def write(self, text: str) -> int:
            if "available 6  in flight 0" in text:
                drawn.set()
            return super().write(text)

    written = Screen()
    console = Console(file=written, width=120, force_terminal=True, color_system=None, legacy_windows=False)
    counts = dict(COUNTS)
    line = progress.ProgressLine(console, 10, 0, 1, lambda: counts)
    line.update(1, {})
    counts["jsonl"] = TaskCounts(target=64, available=6)
    assert drawn.wait(20)  # nobody updates it: it draws itself
    line.close()
    assert all(text in written.getvalue() for text in LINES)
