"""Spans of a run: what was busy when, in a file that a crash or a full disk may truncate."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from rlsdk.isolation import watching
from rlsdk.isolation.watching import Busy, note, span, stage
from rlsdk.runlog.metrics import SPANS, Span, read_spans, recorded


class Clock:
    now = 100.0

    def time(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    found = Clock()
    monkeypatch.setattr(watching, "time", found)
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
