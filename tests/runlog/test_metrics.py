"""`metrics.jsonl` after a kill, a bad sector or an edit: lines that are read, ignored and reported."""

from __future__ import annotations

import json
import logging
import math
import resource
from pathlib import Path

import pytest

from rlsdk.contracts import Run
from rlsdk.runlog.metrics import METRICS, garbled_lines, lines_up_to, read_metrics
from rlsdk.runlog.trackers import JsonlTracker

GARBLED = [b'{"step": 2, "rew', b"[1]", b"null", b"{}", b'{"step": "2"}', b"\xff\xfe\x00", b"", b"[" * 100_000]


@pytest.mark.parametrize("line", GARBLED, ids=range(len(GARBLED)))
def test_a_garbled_line_is_left_out_and_named(tmp_path: Path, line: bytes, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, "rlsdk")
    path = tmp_path / METRICS
    path.write_bytes(b'{"step": 1}\n' + line + b'\n{"step": 3}\n')
    assert lines_up_to(path, 3) == ['{"step": 1}\n', '{"step": 3}\n']
    assert lines_up_to(path, 2) == ['{"step": 1}\n']
    assert len(garbled_lines(path)) == 1
    assert read_metrics(tmp_path) == [{"step": 1}, {"step": 3}]
    assert f"{path}, line 2: expected a JSON object with a step, got " in caplog.text


def test_a_last_line_truncated_by_a_kill_is_not_a_fault(tmp_path: Path) -> None:
    path = tmp_path / METRICS
    path.write_text('{"step": 1}\n{"step": 2, "rew')
    assert lines_up_to(path, 2) == ['{"step": 1}\n']
    assert read_metrics(tmp_path) == [{"step": 1}]
    assert garbled_lines(path) == []


def test_a_last_line_that_lacks_only_its_line_break_is_kept(tmp_path: Path) -> None:
    path = tmp_path / METRICS
    path.write_text('{"step": 1}\n{"step": 2}')
    assert lines_up_to(path, 2) == ['{"step": 1}\n', '{"step": 2}\n']


def test_values_that_json_cannot_hold_are_null(tmp_path: Path) -> None:
    tracker = JsonlTracker()
    tracker.open(Run("a", tmp_path, {}, 0))
    tracker.log(1, {"score/mine": math.nan, "loss": math.inf, "eval/sampled": None, "reward/mean": 0.5})
    tracker.close()
    line = '{"step": 1, "score/mine": null, "loss": null, "eval/sampled": null, "reward/mean": 0.5}\n'
    assert (tmp_path / METRICS).read_text() == line


def test_a_run_without_metrics_has_none(tmp_path: Path) -> None:
    assert (read_metrics(tmp_path), lines_up_to(tmp_path / METRICS, 1)) == ([], [])


def test_a_disk_that_is_full_when_a_run_is_resumed_leaves_the_metrics_so_far(tmp_path: Path) -> None:
    file = tmp_path / METRICS
    lines = "".join(json.dumps({"step": step, "reward/mean": 0.5}) + "\n" for step in range(1, 400))
    file.write_text(lines)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (len(lines) // 2, before[1]))  # as a full disk, writes fail half-way
    try:
        with pytest.raises(OSError, match="too large"):
            JsonlTracker().open(Run("a", tmp_path, {}, 399))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert file.read_text() == lines
