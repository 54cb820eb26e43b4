"""The progress line outside a terminal."""

from __future__ import annotations

import io

from rich.console import Console

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
