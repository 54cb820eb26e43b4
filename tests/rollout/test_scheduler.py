"""Rollouts that run ahead of training on an event loop: timely, expired and paused groups."""

from __future__ import annotations

import asyncio
import json
import math
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlsdk.contracts.rollouts import TaskRecord, TaskStatus
from rlsdk.errors import RunError
from rlsdk.rollout.mixture import Source, TaskStreams
from rlsdk.rollout.staleness import StalenessPolicy
from rlsdk.rollout.stream import SampledStream, TaskStream
from rlsdk.simulation.clock import VirtualLoop, run_virtually
from rlsdk.types import Group, Task
from tests.rollout.bench import Bench


async def test_without_batches_ahead_it_is_synchronous() -> None:
    bench = Bench(StalenessPolicy())
    for step in range(3):
        taken = await bench.step(step)
        assert [t.source for t in taken] == ["a", "a", "a", "b"]
        assert all(t.attempts == 1 for t in taken)
        assert bench.drawn == 4 * (step + 1)  # nothing was started for the next step
        await asyncio.sleep(0.02)
        assert bench.drawn == 4 * (step + 1)
    assert bench.scheduler.expired == 0


async def test_with_a_batch_ahead_the_next_one_is_made_meanwhile() -> None:
    bench = Bench(StalenessPolicy(ahead=1, limit=2))
    await bench.step(0)
    assert bench.drawn >= 8
    await asyncio.sleep(0.05)  # the trainer works
    taken = await asyncio.wait_for(bench.scheduler.take(1), 0.005)  # it was there already
    assert {t.group.rollouts[0].policy_versions[1] for t in taken if t.group} <= {0, 1}


async def test_groups_that_are_too_old_are_sampled_again_and_never_taken() -> None:
    bench = Bench(StalenessPolicy(ahead=2, limit=1))
    await bench.step(0)
    await asyncio.sleep(0.05)  # all of the next two batches are there, of version 0
    bench.version = 1
    taken = await bench.step(1)
    assert bench.scheduler.expired == 8
    assert {int(t.group.rollouts[0].policy_versions[1]) for t in taken if t.group} == set()  # let go of
    assert bench.drawn == 16  # those that expired are tasks again, before any fresh one
    assert all(t.attempts == 2 for t in taken)


class Sampled(Bench):
    """A bench with two sources of forty tasks, of which samplers choose those with the least index."""

    def __init__(self, limits: StalenessPolicy) -> None:
        self.running: list[Task] = []
        self.twice: list[str] = []
        sampler = SimpleNamespace(draw=lambda available, random: int(available[0]), note=lambda index, group: None)
        tasks = {name: [Task(id=f"{name}{i}", prompt="x") for i in range(40)] for name in self.names}
        self.tasks = TaskStreams(
            [Source(name, 1.0, SampledStream(sampler, tasks[name], 0, lambda _: 1, 9, "drop")) for name in tasks]
        )
        super().__init__(limits)

    def __getitem__(self, source: str) -> TaskStream:
        return self.tasks[source]

    def learn(self) -> None:
        self.tasks.learn()

    async def make(self, record: TaskRecord) -> Group:
        self.twice += [task.id for task in self.running if task.id == record.task.id]
        self.running.append(record.task)
        made = await super().make(record)
        self.running.remove(record.task)
        return made


@pytest.mark.parametrize("tail", [0, 2])
async def test_a_sampler_does_not_choose_an_expired_task_that_is_sampled_again(tail: int) -> None:
    bench = Sampled(StalenessPolicy(ahead=2, limit=1, oversample=0.5, tail=tail))
    for step in range(6):
        await bench.step(step)
        await asyncio.sleep(0.05)  # all groups ahead are there, of the weights before this step, and expire
    assert bench.scheduler.expired > 8
    assert bench.twice == []


async def test_a_sampler_does_not_choose_the_tasks_of_groups_that_a_resumed_run_has_lost() -> None:
    limits = StalenessPolicy(ahead=1, limit=9)
    bench, other = Sampled(limits), Sampled(limits)
    await bench.step(0)
    await asyncio.sleep(0.05)  # the next batch is complete: a3, a4, a5 and b1
    other.tasks.restore(bench.tasks.state())
    assert other.scheduler.restore(json.loads(json.dumps(bench.scheduler.state())), {}) == 4
    await bench.scheduler.pause()
    assert [other["a"].draw()[0].id for _ in range(4)] == ["a0", "a1", "a2", "a6"]


async def test_a_slow_group_delays_no_other() -> None:
    bench = Bench(StalenessPolicy(ahead=1, limit=9, oversample=0.5), lambda number: 0.5 if number == 0 else 0.01)
    numbers = [t.number for step in range(3) for t in await bench.step(step)]
    assert 0 not in numbers
    assert len(set(numbers)) == 12


async def test_a_pause_ends_what_runs_and_loses_no_task() -> None:
    bench = Bench(StalenessPolicy(ahead=1, limit=9), lambda number: 0.05)
    first = asyncio.ensure_future(bench.scheduler.take(0))
    await asyncio.sleep(0.01)
    first.cancel()
    assert await bench.scheduler.pause() == 8
    assert bench.ledger.counts("a").waiting == 6
    await asyncio.sleep(0.1)
    assert len(bench.started) == 8
    taken = await bench.step(0)
    assert bench.drawn == 8
    assert sorted(t.number for t in taken) == sorted(t.number for t in taken if t.attempts == 2)


async def test_a_task_that_fails_ends_the_run_at_once_with_its_own_traceback() -> None:
    bench = Bench(StalenessPolicy(), lambda number: 5.0 if number else 1 / number)
    with pytest.raises(ZeroDivisionError) as caught:
        await asyncio.wait_for(bench.scheduler.take(0), 1)
    assert any(frame.name == "make" for frame in caught.traceback)
    await bench.scheduler.pause()


async def test_groups_that_are_not_wanted_are_replaced() -> None:
    bench = Bench(StalenessPolicy(), wanted=lambda group: int(group.task.id[1:]) % 2 == 0)
    taken = await bench.step(0)
    assert all(int(t.task.id[1:]) % 2 == 0 for t in taken)
    counts = bench.ledger.counts("a")
    assert counts.trained == 3
    assert counts.filtered + bench.ledger.counts("b").filtered == bench.drawn - 4


async def test_the_policy_decides_what_is_trained_first() -> None:
    later_first = lambda group, *, step, uses: float(group.task.id[1:]) if group.task.id[0] == "a" else 0.0  # noqa: E731
    bench = Bench(StalenessPolicy(ahead=2, limit=9), policy=later_first)
    await bench.scheduler.take(0)  # of what there was, whatever that is
    await asyncio.sleep(0.05)
    there = [t.number for t in bench.ledger.records("a", TaskStatus.COMPLETED) if not t.taken]
    taken = await bench.scheduler.take(1)
    assert [t.number for t in taken if t.source == "a"] == sorted(there, reverse=True)[:3]


async def test_what_the_policy_drops_is_never_trained_and_another_task_takes_its_place() -> None:
    asked: list[tuple[int, int]] = []

    def even(group: Group, *, step: int, uses: int) -> float | None:
        asked.append((step, uses))
        return 0.0 if int(group.task.id[1:]) % 2 == 0 else None

    bench = Bench(StalenessPolicy(), policy=even)
    taken = await bench.step(0)
    assert all(int(t.task.id[1:]) % 2 == 0 for t in taken)
    counts = [bench.ledger.counts(source) for source in bench.names]
    assert sum(c.trained for c in counts) == 4
    assert bench.scheduler.dropped == sum(c.filtered for c in counts) == bench.drawn - 4 > 0
    assert set(asked) == {(0, 0)}


async def test_a_run_continues_from_its_state_and_repeats_groups_in_progress() -> None:
    limits = StalenessPolicy(ahead=1, limit=9)
    bench = Bench(limits)
    first = await bench.step(0)
    await asyncio.sleep(0.03)  # the next batch is there, and lost with the program
    other = Bench(limits)
    other.drawn = bench.drawn
    assert other.scheduler.restore(json.loads(json.dumps(bench.scheduler.state())), {}) == 4
    await bench.scheduler.pause()
    assert other.ledger.counts("a").waiting == 3
    taken = await other.step(1)
    assert {t.task.id for t in taken} == {f"{t.source}{t.position}" for t in taken}
    assert sorted(t.position for t in taken) == [4, 5, 6, 8]
    assert not {t.number for t in first} & {t.number for t in taken}
    assert other.ledger.counts("a").trained == 6
    assert other.ledger.counts("a").target == 9


async def test_a_batch_that_was_requested_of_a_source_that_is_gone_is_made_of_the_others() -> None:
    limits = StalenessPolicy(ahead=1, limit=9)
    bench = Bench(limits)
    await bench.step(0)
    state = json.loads(json.dumps(bench.scheduler.state()))
    await bench.scheduler.pause()

    class Alone(Bench):
        names = ("a",)

        def divide(self, count: int) -> dict[str, int]:
            return {"a": count}

    other = Alone(limits)
    other.drawn = bench.drawn
    other.scheduler.restore(state, {})
    for step in (1, 2):
        assert [t.source for t in await asyncio.wait_for(other.step(step), 5)] == ["a"] * 4
    await other.scheduler.pause()


async def test_groups_that_waited_come_back_from_what_was_kept_and_only_the_others_are_made_again() -> None:
    limits = StalenessPolicy(ahead=1, limit=9)
    bench = Bench(limits)
    await bench.step(0)
    await asyncio.sleep(0.03)
    there = {record.number: record.group for record in bench.scheduler.unsettled()}
    assert len(there) == 4
    lost = min(there)
    del there[lost]
    other = Bench(limits)
    other.drawn = bench.drawn
    state = json.loads(json.dumps(bench.scheduler.state()))
    assert other.scheduler.restore(state, {n: g for n, g in there.items() if g}) == 1
    assert [t.number for t in other.scheduler.unsettled()] == sorted(there)
    taken = await other.step(1)
    assert len(taken) == 4
    assert set(there) & set(other.started) == set()
    assert {t.attempts for t in taken} == {1}
    await other.scheduler.pause()
    await bench.scheduler.pause()


async def test_a_checkpoint_between_a_step_that_failed_and_its_next_attempt_has_the_same_batch() -> None:
    bench = Bench(StalenessPolicy(ahead=1, limit=9))
    await bench.step(0)
    failed = await bench.scheduler.take(1)  # and the step raises
    state = json.loads(json.dumps(bench.scheduler.state()))
    groups = {t.number: t.group for t in bench.scheduler.unsettled() if t.group}
    other = Bench(StalenessPolicy(ahead=1, limit=9))
    other.drawn = bench.drawn
    other.scheduler.restore(state, groups)
    await bench.scheduler.pause()
    taken = await asyncio.wait_for(other.step(1), 5)
    assert [(t.number, t.task.id) for t in taken] == [(t.number, t.task.id) for t in failed]
    assert other.ledger.counts("a").consumed == other.ledger.counts("a").trained == 6
    assert len(await asyncio.wait_for(other.step(2), 5)) == 4
    await other.scheduler.pause()


@settings(max_examples=30)
@given(
    st.lists(st.tuples(st.integers(0, 3), st.integers(0, 2)), min_size=1, max_size=4),
    st.integers(0, 3),
    st.sampled_from([0.0, 0.5]),
    st.randoms(use_true_random=False),
)
def test_every_task_ends_once_in_the_course_that_survives(
    courses: list[tuple[int, int]], ahead: int, oversample: float, random: Random
) -> None:
    async def run() -> None:
        limits = StalenessPolicy(ahead=ahead, limit=ahead + 1, oversample=oversample)
        bench, step, trained = Bench(limits, lambda number: 0.0), 0, []
        for until_saved, until_killed in courses:
            for _ in range(until_saved):
                trained += [t.task.id for t in await bench.step(step)]
                step += 1
            for _ in range(random.randrange(3)):
                await asyncio.sleep(0)
            state = json.loads(json.dumps({"production": bench.scheduler.state(), "drawn": bench.drawn}))
            # What the store lost is made again; what is there is not.
            kept = {t.number: t.group for t in bench.scheduler.unsettled() if t.group and random.random() < 0.7}
            for later in range(until_killed):
                await bench.step(step + later)
            await bench.scheduler.pause()
            bench = Bench(limits, lambda number: 0.0)
            bench.drawn, bench.version = state["drawn"], step
            bench.scheduler.restore(state["production"], kept)
        for _ in range(2):
            trained += [t.task.id for t in await bench.step(step)]
            step += 1
        await bench.scheduler.pause()
        live = [t.task.id for name in bench.names for t in bench.ledger.records(name, *TaskStatus)]
        assert len(trained) == 4 * step
        assert len({*trained, *live}) == len(trained) + len(live) == bench.drawn

    run_virtually(run())


async def test_who_waits_uses_no_processor() -> None:
    """A scheduler of many tasks on a slow engine sleeps: in fifty seconds its loop hardly turns."""
    bench = Bench(StalenessPolicy(ahead=4, limit=9, oversample=0.5), lambda number: 60.0, batch=500)
    waiting = asyncio.ensure_future(bench.scheduler.take(0))
    await asyncio.sleep(0.5)
    assert len(bench.started) == 5 * 500 + 250 + 1  # the reserves of two sources, rounded up
    loop = asyncio.get_running_loop()
    assert isinstance(loop, VirtualLoop)
    before = loop.turns
    await asyncio.sleep(50.0)
    assert loop.turns - before < 10
    waiting.cancel()
    await bench.scheduler.pause()


async def test_a_policy_that_drops_every_group_ends_the_run() -> None:
    bench = Bench(StalenessPolicy(), policy=lambda group, *, step, uses: None, most_dropped=12)
    with pytest.raises(RunError, match="its policy dropped 12 groups in a row"):
        await bench.scheduler.take(0)
    await bench.scheduler.pause()
    assert bench.scheduler.dropped == 12


@pytest.mark.parametrize(("value", "shown"), [(math.nan, "NaN"), ("high", "'high'")])
async def test_a_priority_that_has_no_place_in_an_order_is_an_error(value: Any, shown: str) -> None:
    bench = Bench(StalenessPolicy(), policy=lambda group, *, step, uses: value)
    with pytest.raises(
        RunError, match=rf"rollout\.buffer: the priority of task '.*' is {shown}; expected a number, or"
    ):
        await bench.scheduler.take(0)
    await bench.scheduler.pause()


async def test_a_policy_that_keeps_some_groups_fills_its_batches() -> None:
    def policy(group: Group, *, step: int, uses: int) -> float | None:
        return 0.0 if int(group.task.id[1:]) % 3 == 0 else None

    bench = Bench(StalenessPolicy(), policy=policy, most_dropped=12)
    for step in range(3):
        assert len(await bench.step(step)) == 4
    await bench.scheduler.pause()
    assert bench.scheduler.dropped > 12
