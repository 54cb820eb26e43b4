"""The twenty invariants of rollouts that run ahead of training; a table lists those that other tests cover.

| | claim | test |
|---|---|---|
| 1 | gap = target - (taken + there); taking never opens it, expiry does | here; `test_task_ledger` (state machine) |
| 2 | targets only grow, asking again changes nothing, what is left over counts for the next batch | here |
| 3 | a source that is not there is an error, never a zero | here |
| 4 | what runs stays within what is wanted and a reserve that the batch fixes | here; `test_task_ledger` |
| 5 | a tail batch has no reserve, and its mode lasts for the batch | here |
| 6 | every group is taken once, whatever pauses | here; `test_paused_rollouts` |
| 7 | once paused, nothing starts | here |
| 8 | one task that fails loses none of the others | here |
| 9 | a task that had to be cancelled is there again, with what there was of it | here |
| 10 | an ended answer keeps what it had, or begins anew with all its room | `engines/test_pausable` |
| 11 | an ended answer is not judged; a whole one is not sampled on | `test_pausable`, `test_paused_rollouts` |
| 12 | new tokens bear the new version, old ones theirs, all arrays have one length | `test_pausable_in_engines` |
| 13 | the boundary of expiry is inclusive, and read with every batch; whole siblings stay | here; `test_pausable` |
| 14 | what expired, was aborted or left out is never handed over, is counted once and let go of | here |
| 15 | filters see whole groups only | here |
| 16 | groups stay whole, a batch is no larger than asked for, in the order of issue, also after a resume | here |
| 17 | divisions add up, are reproducible, and no two sources share a name | here; `test_stream`, `config/test_check` |
| 18 | there are no empty batches: a batch waits for one group at least | here |
| 19 | a failure in the background is raised by the next `take`, with its traceback | here |
| 20 | a resumed run makes again what was on its way, then goes on where its sources stood | here; `test_scheduler` |
"""

from __future__ import annotations

import asyncio
import json
import random
from collections import Counter
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlsdk.algorithms.buffers import enough
from rlsdk.config.rollout import RolloutSection
from rlsdk.contracts.rollouts import TaskRecord, TaskStatus
from rlsdk.errors import RunError
from rlsdk.rollout.mixture import Allocator
from rlsdk.rollout.scheduler import UnfinishedError
from rlsdk.rollout.staleness import StalenessPolicy
from rlsdk.rollout.task_ledger import ENDS
from rlsdk.simulation.clock import run_virtually
from rlsdk.types import Group, Task
from tests.rollout.bench import Bench, group


def versions(record: TaskRecord) -> list[int]:
    assert record.group is not None
    return record.group.rollouts[0].policy_versions[1:].tolist()  # type: ignore[no-any-return]


async def test_01_taking_never_opens_the_gap_and_expiry_does() -> None:
    bench = Bench(StalenessPolicy(ahead=2, limit=2))
    taken = await bench.scheduler.take(0)
    await asyncio.sleep(0.05)
    counts = bench.ledger.counts("a")
    assert (counts.target, counts.consumed, counts.available, counts.gap) == (9, 3, 6, 0)
    bench.scheduler.settle(taken, [TaskStatus.TRAINED] * 4)
    assert bench.ledger.counts("a").gap == 0
    bench.scheduler._rank(2)  # version 0 is two steps old
    assert bench.ledger.counts("a").gap == 6


async def test_02_targets_only_grow_and_what_is_left_over_counts_for_the_next_batch() -> None:
    bench = Bench(StalenessPolicy(limit=9, oversample=1.0))
    taken = await bench.scheduler.take(0)
    assert bench.ledger.counts("a").target == 3
    await asyncio.sleep(0.05)  # the reserve comes, too
    assert bench.ledger.counts("a").available == 3
    assert bench.drawn == 8
    bench.scheduler.settle(taken, [TaskStatus.TRAINED] * 4)
    await bench.step(1)
    assert bench.drawn == 8  # the batch was there
    assert bench.ledger.counts("a").target == 6
    bench.ledger.ask("a", 2)
    assert bench.ledger.counts("a").target == 6


async def test_02_asking_again_for_a_step_changes_nothing() -> None:
    bench = Bench(StalenessPolicy(ahead=1, limit=9), lambda number: 9.0)
    for _ in range(3):  # a take that was cancelled is begun again
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(bench.scheduler.take(0), 0.01)
    assert bench.ledger.counts("a").target == 6
    assert len(bench.started) == 8
    await bench.scheduler.pause()


async def test_02_a_step_that_is_tried_again_gets_its_batch_until_it_is_settled() -> None:
    bench = Bench(StalenessPolicy(ahead=1, limit=9))
    first = await bench.scheduler.take(0)
    await bench.scheduler.pause()
    assert await bench.scheduler.take(0) == first
    assert bench.ledger.counts("a").consumed == 3
    bench.scheduler.settle(first, [TaskStatus.TRAINED] * 4)
    assert not {t.number for t in first} & {t.number for t in await bench.scheduler.take(1)}
    with pytest.raises(RunError, match="the batch of step 0 has already been taken and settled"):
        await bench.scheduler.take(0)
    await bench.scheduler.pause()


def test_03_a_source_that_is_not_there_is_an_error() -> None:
    bench = Bench(StalenessPolicy())
    for call in (
        bench.ledger.counts,
        lambda name: bench.ledger.ask(name, 3),
        lambda name: bench.ledger.wanted(name, 1, 0),
    ):
        with pytest.raises(KeyError, match="nobody"):
            call("nobody")


@pytest.mark.parametrize("oversample", [0.0, 0.5])
def test_04_what_runs_stays_within_what_is_wanted_and_the_reserve(oversample: float) -> None:
    most: list[int] = []

    async def body() -> None:
        rng = random.Random(0)
        bench = Bench(StalenessPolicy(ahead=1, limit=9, oversample=oversample), lambda number: rng.random() / 50)
        make = bench.make

        async def watched(record: TaskRecord) -> Group:
            counts = bench.ledger.counts("a")
            reserve = 2 if oversample else 0  # half of three, rounded up, however small the gap
            most.append(counts.scheduled - counts.gap)
            assert counts.scheduled <= counts.target - counts.consumed - counts.available + reserve
            return await make(record)

        bench.scheduler._make = watched
        for step in range(6):
            await bench.step(step)
        await bench.scheduler.pause()

    run_virtually(body())
    assert max(most) == (2 if oversample else 0)


async def test_05_a_tail_batch_is_made_of_what_expired_then_of_what_was_aborted_without_a_reserve() -> None:
    bench = Bench(StalenessPolicy(ahead=1, limit=1, oversample=1.0, tail=3))
    await bench.step(0)
    await asyncio.sleep(0.05)
    before = bench.drawn
    assert bench.ledger.counts("a").available == 6  # a batch and the reserve
    bench.started.clear()
    bench.seconds = lambda number: 0.01 + 0.01 * (number % 10)  # they come one after the other
    taken = await bench.step(1)  # all of it is too old
    assert bench.scheduler.expired == 6 + 2
    fresh = [n for n in bench.started if n >= before]
    again = [t for t in taken if t.source == "a"]
    assert [t.attempts for t in again] == [2, 2, 2]
    # Of source b two have expired, fewer than the tail: they wait, and fresh tasks are drawn, with the reserve.
    assert len(bench.ledger.records("b", TaskStatus.EXPIRED)) == 2
    assert {t.attempts for t in taken if t.source == "b"} == {1}
    assert len(fresh) == 2 + 1
    counts = bench.ledger.counts("a")
    assert counts.scheduled + counts.available == 3  # the batch ahead; no reserve, though none waits any more
    await bench.scheduler.pause()


async def test_04_another_takes_the_place_of_what_is_left_out_while_the_trainer_works() -> None:
    late = {3: 0.05}  # the fourth of a, behind the batch
    bench = Bench(
        StalenessPolicy(ahead=1, limit=9), lambda n: late.get(n, 0.01), wanted=lambda group: group.task.id != "a4"
    )
    await bench.step(0)
    assert bench.drawn == 8
    await asyncio.sleep(0.2)  # nobody takes
    assert bench.drawn == 8 + 1
    assert bench.ledger.counts("a").available == 3


async def test_05_expired_tasks_may_be_given_up_and_count_as_filtered() -> None:
    bench = Bench(StalenessPolicy(ahead=1, limit=1, tail=-1))
    await bench.step(0)
    await asyncio.sleep(0.05)
    taken = await bench.step(1)
    assert bench.scheduler.expired == 4
    assert {t.attempts for t in taken} == {1}
    assert (bench.ledger.counts("a").filtered, bench.ledger.counts("a").expired) == (3, 3)
    assert bench.drawn == 16  # four of each batch, four that were given up, four ahead
    await bench.scheduler.pause()
    assert_adds_up(bench)


def assert_adds_up(bench: Bench) -> None:
    """Every record is somewhere, once."""
    live = [t for name in bench.names for t in bench.ledger.records(name, *TaskStatus)]
    ended = sum(getattr(bench.ledger.counts(n), s.value) for n in bench.names for s in ENDS)
    assert len({t.number for t in live}) == len(live)
    assert len(live) + ended == bench.drawn


@settings(deadline=None, max_examples=12)
@given(seed=st.integers(0, 10_000), tail=st.sampled_from([0, 2, -1]), valve=st.booleans())
def test_06_every_group_is_taken_once_whatever_pauses(seed: int, tail: int, valve: bool) -> None:
    async def body() -> None:
        rng = random.Random(seed)
        bench = Bench(
            StalenessPolicy(ahead=1, limit=2, oversample=0.5, tail=tail), lambda n: rng.random() / 100, valve=valve
        )
        took: Counter[int] = Counter()
        for step in range(5):
            while True:
                waiting = asyncio.ensure_future(bench.scheduler.take(step))
                done, _ = await asyncio.wait([waiting], timeout=rng.random() / 100)
                if done:
                    break
                waiting.cancel()
                await asyncio.wait([waiting])
                if not waiting.cancelled():  # it came at the same moment
                    break
                await bench.scheduler.pause(rng.choice([0.0, 0.01]))
                assert bench.ledger.counts("a").scheduled == bench.ledger.counts("b").scheduled == 0
                assert_adds_up(bench)
            taken = waiting.result()
            took.update(t.number for t in taken)
            bench.scheduler.settle(taken, [TaskStatus.TRAINED] * len(taken))
            bench.version = step + 1
        await bench.scheduler.pause()
        assert max(took.values()) == 1
        assert sum(bench.ledger.counts(n).trained for n in bench.names) == took.total() == 20
        assert_adds_up(bench)

    run_virtually(body())


@pytest.mark.parametrize("valve", [True, False])
async def test_07_once_paused_nothing_starts(valve: bool) -> None:
    bench = Bench(StalenessPolicy(ahead=1, limit=9), lambda n: 0.01 * (n + 1), valve=valve, wanted=lambda group: False)
    waiting = asyncio.ensure_future(bench.scheduler.take(0))
    while len(bench.started) <= 8:  # noqa: ASYNC110 - groups that are left out are replaced as they come
        await asyncio.sleep(0.001)
    waiting.cancel()
    started = len(bench.started)
    bench.deaf = True
    await bench.scheduler.pause(0.05, again=0.005)  # some end meanwhile
    assert (bench.interrupts > 1) is valve  # it was said again
    assert bench.ledger.counts("a").filtered > 0
    await asyncio.sleep(0.05)
    assert len(bench.started) == started


async def test_07_after_a_pause_others_may_sample_with_the_same_client() -> None:
    bench = Bench(StalenessPolicy(ahead=1, limit=9), lambda number: 9.0, valve=True)
    waiting = asyncio.ensure_future(bench.scheduler.take(0))
    await asyncio.sleep(0.01)
    waiting.cancel()
    assert await bench.scheduler.pause(1.0) == 8
    assert bench.interrupts
    answer = await bench.make(TaskRecord(99, "a", Task(id="evaluation", prompt="x"), 0))
    assert answer.rollouts[0].status == "finished"


class Failing(Bench):
    """One of its tasks fails, after a while."""

    async def make(self, record: TaskRecord) -> Group:
        if record.number == 6:
            await asyncio.sleep(self.seconds(6))
            raise ZeroDivisionError("the sixth")
        return await super().make(record)


async def test_08_one_task_that_fails_loses_none_of_the_others() -> None:
    bench = Failing(StalenessPolicy(ahead=1, limit=9), lambda n: 0.02 if n == 6 else 0.01 if n != 5 else 0.04)
    await bench.step(0)
    with pytest.raises(ZeroDivisionError):
        await bench.scheduler.take(1)
    assert not [t for n in bench.names for t in bench.ledger.records(n, TaskStatus.COMPLETED) if t.taken]
    await asyncio.sleep(0.05)  # the one that runs is not torn down with it
    assert bench.ledger.counts("a").available + bench.ledger.counts("b").available == 12 - 4 - 1
    [failed] = [t for name in bench.names for t in bench.ledger.records(name, TaskStatus.ABORTED)]
    assert failed.number == 6
    assert_adds_up(bench)


async def test_09_stopped_requests_continue_from_their_tokens_and_cancelled_ones_from_earlier_tokens() -> None:
    bench = Bench(StalenessPolicy(limit=9), lambda n: 60.0, valve=True)
    waiting = asyncio.ensure_future(bench.scheduler.take(0))
    await asyncio.sleep(0.01)
    waiting.cancel()
    assert await bench.scheduler.pause(3.0) == 4
    aborted = bench.ledger.records("a", TaskStatus.ABORTED)
    assert [versions(t) for t in aborted] == [[0]] * 3  # the token that each had
    bench.version, bench.deaf = 1, True
    waiting = asyncio.ensure_future(bench.scheduler.take(0))
    await asyncio.sleep(0.01)
    waiting.cancel()
    await bench.scheduler.pause(0.01)  # nobody listens: they are cancelled
    assert [versions(t) for t in bench.ledger.records("a", TaskStatus.ABORTED)] == [[0]] * 3
    bench.version, bench.deaf, bench.seconds = 2, False, lambda n: 0.01
    taken = await bench.scheduler.take(0)
    assert [versions(t) for t in taken] == [[0, 2]] * 4
    assert [t.attempts for t in taken] == [3] * 4
    assert bench.drawn == 4


async def test_09_a_task_that_is_cancelled_before_its_first_turn_is_there_again() -> None:
    bench = Bench(StalenessPolicy())
    bench.scheduler._request(0)
    bench.scheduler._fill()
    assert bench.started == []
    assert await bench.scheduler.pause() == 4
    assert bench.ledger.counts("a").waiting == 3
    assert len(await bench.step(0)) == 4


async def test_09_a_task_may_say_itself_that_it_is_unfinished() -> None:
    bench = Bench(StalenessPolicy(limit=9))
    make = bench.make

    async def stopped(record: TaskRecord) -> Group:
        if record.attempts == 1:
            raise UnfinishedError(group(record.task, [0]))
        return await make(record)

    bench.scheduler._make = stopped
    assert [versions(t) for t in await bench.scheduler.take(0)] == [[0, 0]] * 4


@pytest.mark.parametrize("age", [1, 2])
async def test_13_the_boundary_of_expiry_is_inclusive_and_looked_at_with_every_batch(age: int) -> None:
    bench = Bench(StalenessPolicy(ahead=age, limit=2))
    await bench.step(0)
    await asyncio.sleep(0.05)  # the batches ahead are there, of version 0
    bench.version = age
    for step in range(1, age):
        await bench.step(step)
    taken = await bench.scheduler.take(age)
    assert {v for t in taken for v in versions(t)} == ({0} if age == 1 else {2})
    assert bench.scheduler.expired == (0 if age == 1 else 4)
    await bench.scheduler.pause()


def test_13_old_tokens_are_masked_and_a_group_of_nothing_else_expires() -> None:
    async def body() -> None:
        bench = Bench(StalenessPolicy(ahead=0, limit=4, token_limit=2), lambda n: 60.0, valve=True)
        waiting = asyncio.ensure_future(bench.scheduler.take(0))
        await asyncio.sleep(0.005)
        waiting.cancel()
        await bench.scheduler.pause(3.0)
        bench.version, bench.seconds = 3, lambda n: 0.01
        bench.scheduler._requested = 3
        bench.scheduler._batches[3] = {"a": 3, "b": 1}
        taken = await bench.scheduler.take(3)
        held = [t.group.rollouts[0] for t in taken if t.group]
        assert [r.policy_versions.tolist() for r in held] == [[-1, 0, 3]] * 4
        assert [r.loss_mask.tolist() for r in held] == [[False, False, True]] * 4  # version 0 is three steps old
        assert bench.scheduler.expired == 0

    async def nothing_left() -> None:
        bench = Bench(StalenessPolicy(ahead=1, limit=4, token_limit=1))
        await bench.step(0)
        await asyncio.sleep(0.05)
        taken = await bench.scheduler.take(1)  # all tokens of version 0 are a step old
        assert bench.scheduler.expired == 4
        assert [versions(t) for t in taken] == [[1]] * 4
        await bench.scheduler.pause()

    run_virtually(body())
    run_virtually(nothing_left())


async def test_13_answers_are_not_sampled_further_ahead_than_their_tokens_may_be_trained() -> None:
    bench = Bench(StalenessPolicy.of(RolloutSection(max_staleness=4, max_token_staleness=1)))
    for step in range(6):
        await bench.step(step)
        await asyncio.sleep(0.05)  # everything that is requested ends before the sync
    assert bench.scheduler.expired == 0
    assert bench.drawn == 7 * 4  # six batches, and the one after them
    await bench.scheduler.pause()


async def test_14_what_is_not_trained_is_counted_once_and_let_go_of() -> None:
    bench = Bench(StalenessPolicy(ahead=1, limit=1), wanted=lambda group: group.task.id not in ("a1", "a2"))
    issued: list[TaskRecord] = []
    issue = bench.ledger.issue

    def kept(*arguments: Any) -> TaskRecord:
        issued.append(issue(*arguments))
        return issued[-1]

    bench.ledger.issue = kept  # type: ignore[method-assign]
    taken = [*await bench.step(0)]
    await asyncio.sleep(0.05)
    taken += await bench.step(1)
    await bench.scheduler.pause()
    assert bench.ledger.counts("a").filtered == 2
    assert bench.scheduler.expired == sum(t.attempts == 2 for t in issued) > 0
    assert not {t.task.id for t in taken} & {"a1", "a2"}
    assert all(t.group is None for t in issued if t.state is not TaskStatus.COMPLETED)
    assert sum(t.state is TaskStatus.FILTERED for t in issued) == 2
    assert_adds_up(bench)


async def test_15_filters_see_whole_groups_only() -> None:
    seen: list[str] = []

    def wanted(given: Group) -> bool:
        seen.extend(rollout.status for rollout in given.rollouts)
        return True

    bench = Bench(StalenessPolicy(limit=9), lambda n: 60.0, valve=True, wanted=wanted)
    waiting = asyncio.ensure_future(bench.scheduler.take(0))
    await asyncio.sleep(0.005)
    waiting.cancel()
    await bench.scheduler.pause(3.0)
    assert seen == []
    bench.seconds = lambda n: 0.01
    await bench.step(0)
    assert seen == ["finished"] * 4


async def test_16_a_batch_is_no_larger_than_asked_for_and_in_the_order_of_issue_also_after_a_resume() -> None:
    rng = random.Random(1)
    limits = StalenessPolicy(ahead=2, limit=9, oversample=1.0)
    bench = Bench(limits, lambda n: rng.random() / 50)
    await bench.step(0)
    await asyncio.sleep(0.05)
    there = [t.number for t in bench.ledger.records("a", TaskStatus.COMPLETED)]
    taken = await bench.step(1)
    assert [t.number for t in taken if t.source == "a"] == there[:3]
    assert Counter(t.source for t in taken) == {"a": 3, "b": 1}
    assert all(t.group is None for t in taken)  # let go of, once trained
    other = Bench(limits, lambda n: 0.001)
    other.drawn = bench.drawn
    other.scheduler.restore(json.loads(json.dumps(bench.scheduler.state())), {})
    left = sorted(t.position for t in bench.ledger.records("a", *TaskStatus))
    await bench.scheduler.pause()
    again = await other.step(2)
    assert [t.position for t in again if t.source == "a"] == left[:3]
    await other.scheduler.pause()


@given(weights=st.lists(st.floats(0.01, 1.0), min_size=1, max_size=5), counts=st.lists(st.integers(1, 32), max_size=20))
def test_17_divisions_add_up_and_are_reproducible(weights: list[float], counts: list[int]) -> None:
    one, two = Allocator(weights), Allocator(weights)
    for count in counts:
        parts = one.divide(count)
        assert sum(parts) == count
        assert parts == two.divide(count)


async def test_18_there_are_no_empty_batches() -> None:
    bench = Bench(StalenessPolicy(ahead=1, limit=1), stop=lambda *, available, target: True)
    assert len(await bench.step(0)) >= 1
    await asyncio.sleep(0.05)
    for step in (1, 2):  # all that is there has expired: the batch waits for what is made again
        taken = await bench.scheduler.take(step)
        assert taken
        assert {v for t in taken for v in versions(t)} == {step}
        bench.scheduler.settle(taken, [TaskStatus.TRAINED] * len(taken))
        bench.version = step + 1
        await asyncio.sleep(0.03)
    await bench.scheduler.pause()


async def test_18_a_part_of_a_batch_may_be_enough_and_the_rest_is_for_the_next() -> None:
    def rule(*, available: int, target: int) -> bool:
        return enough(available=available, target=target, share=0.5)

    bench = Bench(StalenessPolicy(limit=9), lambda n: 0.01 if n in (0, 1) else 0.3, stop=rule)
    first = await bench.step(0)
    assert sorted(t.number for t in first) == [0, 1]
    assert bench.ledger.counts("a").scheduled + bench.ledger.counts("b").scheduled == 2  # they run on
    await asyncio.sleep(0.35)
    second = await bench.step(1)
    assert {2, 3} <= {t.number for t in second}
    assert bench.drawn == 4 + 2  # the two that came late are part of the second four
    await bench.scheduler.pause()
    assert_adds_up(bench)


async def test_18_an_answer_other_than_yes_or_no_is_no_answer() -> None:
    bench = Bench(StalenessPolicy(limit=9), lambda n: 0.01 * n, stop=lambda *, available, target: "yes")
    with pytest.raises(RunError, match=r"rollout\.stop returned 'yes'; expected True or False"):
        await bench.step(0)
    await bench.scheduler.pause()


async def test_19_a_failure_while_nobody_takes_is_kept_and_raised_with_its_traceback() -> None:
    bench = Failing(StalenessPolicy(ahead=1, limit=9), lambda n: 0.02 if n == 6 else 0.01)
    await bench.step(0)
    await asyncio.sleep(0.05)
    failure = bench.scheduler.failure
    assert isinstance(failure, ZeroDivisionError)
    started = len(bench.started)
    with pytest.raises(ZeroDivisionError, match="the sixth") as caught:
        await bench.scheduler.take(1)
    assert caught.value is failure
    assert any(frame.name == "make" for frame in caught.traceback)
    assert len(bench.started) == started  # nothing starts any more
    await bench.scheduler.pause()


async def test_20_a_resumed_run_makes_again_what_was_on_its_way_and_goes_on_where_its_sources_stood() -> None:
    bench = Bench(StalenessPolicy(ahead=1, limit=9, oversample=0.5))
    await bench.step(0)
    await asyncio.sleep(0.03)
    state = json.loads(json.dumps(bench.scheduler.state()))  # as it stands, while tasks run
    on_the_way = {p for positions in state["on_the_way"].values() for p in positions}
    other = Bench(StalenessPolicy(ahead=1, limit=9, oversample=0.5))
    other.drawn = bench.drawn
    assert other.scheduler.restore(state, {}) == len(on_the_way)
    seen: list[int] = []
    for step in range(1, 4):
        seen += [t.position for t in await other.step(step)]
    assert on_the_way <= {*seen, *(t.position for n in other.names for t in other.ledger.records(n, *TaskStatus))}
    assert len(set(seen)) == len(seen)
    ended = bench.ledger.counts("a").trained + bench.ledger.counts("b").trained
    assert ended + len(on_the_way) == bench.drawn  # nothing is missing
    await bench.scheduler.pause()
    await other.scheduler.pause()
