"""Production ahead of training, on an event loop: what is there in time, what expires, what a pause leaves."""

from __future__ import annotations

import asyncio
import json

import pytest

from rlsdk.rollout.production import Pace
from tests.rollout.bench import Bench


def test_without_batches_ahead_it_is_synchronous() -> None:
    async def run() -> None:
        bench = Bench(Pace())
        for step in range(3):
            taken = await bench.step(step)
            assert [t.source for t in taken] == ["a", "a", "a", "b"]
            assert all(t.attempts == 1 for t in taken)
            assert bench.drawn == 4 * (step + 1)  # nothing was started for the next step
            await asyncio.sleep(0.02)
            assert bench.drawn == 4 * (step + 1)
        assert bench.production.expired == 0

    asyncio.run(run())


def test_with_a_batch_ahead_the_next_one_is_made_meanwhile() -> None:
    async def run() -> None:
        bench = Bench(Pace(ahead=1, limit=2))
        await bench.step(0)
        assert bench.drawn >= 8
        await asyncio.sleep(0.05)  # the trainer works
        taken = await asyncio.wait_for(bench.production.take(1), 0.005)  # it was there already
        assert {t.group.rollouts[0].policy_versions[1] for t in taken if t.group} <= {0, 1}

    asyncio.run(run())


def test_what_is_too_old_is_made_again_and_never_taken() -> None:
    async def run() -> None:
        bench = Bench(Pace(ahead=2, limit=1))
        await bench.step(0)
        await asyncio.sleep(0.05)  # all of the next two batches are there, of version 0
        bench.version = 1
        taken = await bench.step(1)
        assert bench.production.expired == 8
        assert {int(t.group.rollouts[0].policy_versions[1]) for t in taken if t.group} == set()  # let go of
        assert bench.drawn == 16  # those that expired are tasks again, before any fresh one
        assert all(t.attempts == 2 for t in taken)

    asyncio.run(run())


def test_a_slow_group_keeps_nobody_from_working() -> None:
    async def run() -> None:
        bench = Bench(Pace(ahead=1, limit=9, oversample=0.5), lambda number: 0.5 if number == 0 else 0.01)
        numbers = [t.number for step in range(3) for t in await bench.step(step)]
        assert 0 not in numbers
        assert len(set(numbers)) == 12

    asyncio.run(asyncio.wait_for(run(), 0.4))


def test_a_pause_ends_what_runs_and_loses_no_task() -> None:
    async def run() -> None:
        bench = Bench(Pace(ahead=1, limit=9), lambda number: 0.05)
        first = asyncio.ensure_future(bench.production.take(0))
        await asyncio.sleep(0.01)
        first.cancel()
        assert await bench.production.pause() == 8
        assert bench.book.counts("a").waiting == 6
        await asyncio.sleep(0.1)
        assert len(bench.started) == 8
        taken = await bench.step(0)
        assert bench.drawn == 8
        assert sorted(t.number for t in taken) == sorted(t.number for t in taken if t.attempts == 2)

    asyncio.run(run())


def test_a_task_that_fails_ends_the_run_at_once_with_its_own_traceback() -> None:
    async def run() -> None:
        bench = Bench(Pace(), lambda number: 5.0 if number else 1 / number)
        with pytest.raises(ZeroDivisionError) as caught:
            await asyncio.wait_for(bench.production.take(0), 1)
        assert any(frame.name == "make" for frame in caught.traceback)
        await bench.production.pause()

    asyncio.run(run())


def test_groups_that_are_not_wanted_are_replaced() -> None:
    async def run() -> None:
        bench = Bench(Pace(), wanted=lambda group: int(group.task.id[1:]) % 2 == 0)
        taken = await bench.step(0)
        assert all(int(t.task.id[1:]) % 2 == 0 for t in taken)
        counts = bench.book.counts("a")
        assert counts.trained == 3
        assert counts.filtered + bench.book.counts("b").filtered == bench.drawn - 4

    asyncio.run(run())


def test_a_run_goes_on_from_its_state_and_makes_again_what_was_on_its_way() -> None:
    async def run() -> None:
        pace = Pace(ahead=1, limit=9)
        bench = Bench(pace)
        await bench.step(0)
        await asyncio.sleep(0.03)  # the next batch is there, and lost with the program
        other = Bench(pace)
        other.drawn = bench.drawn
        assert other.production.restore(json.loads(json.dumps(bench.production.state()))) == 4
        await bench.production.pause()
        assert other.book.counts("a").waiting == 3
        taken = await other.step(1)
        assert {t.task.id for t in taken} == {f"{t.source}{t.position}" for t in taken}
        assert sorted(t.position for t in taken) == [4, 5, 6, 8]
        assert other.book.counts("a").trained == 6
        assert other.book.counts("a").target == 9

    asyncio.run(run())
