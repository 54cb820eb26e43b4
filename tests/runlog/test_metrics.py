"""Files of a run with one JSON object per line, after a kill, a bad sector or an edit; metrics and spans."""

from __future__ import annotations

import asyncio
import errno
import json
import logging
import math
import os
import resource
from pathlib import Path
from typing import Any

import pytest

from rlsdk.contracts import Run
from rlsdk.isolation import watching
from rlsdk.isolation.watching import Busy, note, span, stage
from rlsdk.runlog.metrics import METRICS, SPANS, Span, garbled_lines, lines_up_to, read_metrics, read_spans, recorded
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


def test_a_disk_that_fails_when_the_file_is_synced_is_reported_with_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(_: int) -> None:
        raise OSError(errno.EIO, "Input/output error")

    tracker = JsonlTracker()
    tracker.open(Run("trial", tmp_path, {}, 0))
    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(OSError, match=r"Input/output error: '.*metrics\.jsonl'"):
        tracker.close()


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


class Clock:
    now = 100.0

    def time(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    found = Clock()
    monkeypatch.setattr(watching, "now", found.time)
    return found


def test_stages_and_spans_of_all_tasks_and_threads_are_in_the_file(tmp_path: Path, clock: Clock) -> None:
    async def learn() -> None:
        def ask() -> None:
            with span("learner rank 0", "update"):
                clock.now += 2

        await asyncio.to_thread(ask)

    with recorded(tmp_path), stage("update"):
        asyncio.run(learn())
    note("driver", "late", 0.0)  # the run has ended: nobody records it
    found = sorted(read_spans(tmp_path), key=lambda each: each.actor)
    assert found == [Span("driver", "update", 100.0, 102.0), Span("learner rank 0", "update", 100.0, 102.0)]
    with (tmp_path / SPANS).open("a") as file:
        file.write('["driver", "upd')
    with recorded(tmp_path), span("driver", "resumed"):
        clock.now += 1
    assert [each.name for each in read_spans(tmp_path)][:2] == ["update", "update"]


def test_something_is_busy_from_its_first_request_to_its_last_answer(tmp_path: Path, clock: Clock) -> None:
    with recorded(tmp_path):
        busy = Busy("engine 0", "generate")
        busy.begin(3)
        clock.now += 0.25
        busy.end(2, tokens=10)
        clock.now += 0.25
        busy.end(1, tokens=5)
        clock.now += 9.0  # idle
        busy.begin(1)
        clock.now += 0.5
        busy.drop()
        busy.drop()
    first, second = read_spans(tmp_path)
    assert first == Span("engine 0", "generate", 100.0, 100.5, {"requests": 3.0, "tokens": 15.0, "waiting": 0.0})
    assert (second.begin, second.end) == (109.5, 110.0)


def test_what_is_busy_all_the_time_is_cut_at_an_answer(tmp_path: Path, clock: Clock) -> None:
    with recorded(tmp_path):
        busy = Busy("engine 0", "generate")
        for _ in range(5):
            busy.begin(2)
            clock.now += 0.75
            busy.end(1, tokens=4)
    found = read_spans(tmp_path)
    assert [(each.begin, each.end) for each in found] == [(100.0, 101.5), (101.5, 103.0)]
    assert [each.counts for each in found] == [
        {"requests": 2.0, "tokens": 8.0, "waiting": 2.0},
        {"requests": 2.0, "tokens": 8.0, "waiting": 4.0},
    ]


def test_a_folder_that_cannot_be_written_costs_the_trace_and_nothing_else(tmp_path: Path) -> None:
    ran: list[Any] = []
    with recorded(tmp_path / "missing"), stage("update"):
        ran.append(1)
    assert ran and read_spans(tmp_path / "missing") == []
