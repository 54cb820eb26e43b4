"""Several task sources: their shares of a batch, and their state in a resumed run."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlsdk.rollout.stream import Allocator, Source, TaskStream, TaskStreams
from rlsdk.types import Task


def streams(**weights: float) -> TaskStreams:
    return TaskStreams(
        [
            Source(
                name,
                weight,
                TaskStream([Task(id=f"{name}{i}", prompt="x") for i in range(7)], 0, lambda _: 1, 9, "drop"),
            )
            for name, weight in weights.items()
        ]
    )


def test_a_small_source_is_not_starved() -> None:
    allocator = Allocator([0.05, 0.95])
    given = [allocator.divide(8) for _ in range(20)]
    assert given[0] == [0, 8]  # 0.4 of a task: carried over
    assert given[1] == [1, 7]
    assert sum(small for small, _ in given) == 8  # of 160, a twentieth


WEIGHTS = st.lists(st.floats(0, 10), min_size=1, max_size=6).filter(lambda w: sum(w) > 1e-3)


@given(weights=WEIGHTS, batches=st.lists(st.integers(0, 70), max_size=40))
def test_batches_are_full_and_every_source_stays_near_its_share(weights: list[float], batches: list[int]) -> None:
    allocator, given = Allocator(weights), [0] * len(weights)
    for count in batches:
        parts = allocator.divide(count)
        assert sum(parts) == count
        assert min(parts) >= 0
        given = [a + b for a, b in zip(given, parts, strict=True)]
    for weight, got in zip(weights, given, strict=True):
        assert abs(got - sum(batches) * weight / sum(weights)) < 2
        assert weight or not got


def drawn(tasks: TaskStreams, count: int) -> list[str]:
    """A batch."""
    return [tasks.draw(source)[0].id for source, part in tasks.divide(count).items() for _ in range(part)]


@given(takes=st.lists(st.integers(1, 9), min_size=2, max_size=8), at=st.integers(1, 7))
def test_a_resumed_run_draws_what_one_left_alone_draws(takes: list[int], at: int) -> None:
    whole, first = streams(a=0.2, b=1, c=0.5), streams(a=0.2, b=1, c=0.5)
    batches = [drawn(whole, n) for n in takes]
    for n in takes[:at]:
        drawn(first, n)
    resumed = streams(a=0.2, b=1, c=0.5)
    resumed.restore(first.state())
    assert [drawn(resumed, n) for n in takes[at:]] == batches[at:]


def test_a_source_with_a_changed_number_of_tasks_is_reported(caplog: pytest.LogCaptureFixture) -> None:
    before = streams(a=1, b=1)
    drawn(before, 4)
    state = before.state()
    streams(a=1, b=1).restore(state)
    assert not caplog.records
    state["b"]["size"] = 5
    streams(a=1, b=1).restore(state)
    assert "source b had 5 tasks at the checkpoint and has 7 now" in caplog.text


def test_a_new_source_begins_at_its_start() -> None:
    before = streams(a=1)
    drawn(before, 3)
    after = streams(a=1, b=1)
    after.restore(before.state())
    assert after.state()["a"]["position"] == 3
    assert after.state()["b"] == {"position": 0, "dropped": 0, "carry": 0.0, "size": 7}
