"""Spans of a run's processes."""

from __future__ import annotations

import time

import pytest

from rlsdk.isolation.watching import RECORDER, Busy, span


class Spans:
    """Keeps what is recorded."""

    def __init__(self) -> None:
        self.found: list[tuple[str, float, float]] = []

    def add(self, actor: str, name: str, begin: float, end: float, counts: dict[str, float]) -> None:
        self.found.append((name, begin, end))


@pytest.mark.parametrize("step", [-3600.0, 3600.0])
def test_a_clock_that_is_set_changes_no_span(step: float, monkeypatch: pytest.MonkeyPatch) -> None:
    spans, busy, real = Spans(), Busy("engine 0", "generation"), time.time
    token = RECORDER.set(spans)
    try:
        busy.begin()
        with span("learner rank 0", "update"):
            monkeypatch.setattr(time, "time", lambda: real() + step)
        busy.end()
    finally:
        RECORDER.reset(token)
    assert [name for name, *_ in spans.found] == ["update", "generation"]
    for _, begin, end in spans.found:
        assert 0 <= end - begin < 60 and abs(begin - real()) < 60
