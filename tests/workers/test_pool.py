"""Groups are distributed to workers, a dead worker's go to others, and commands reach every worker in order."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import AsyncIterator, Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import cloudpickle
import pytest
from ray.core.generated.common_pb2 import ActorDiedErrorContext
from ray.exceptions import ActorDiedError

from rlsdk.cluster.nodes import HAND_BACK_SECONDS, DrainingNode
from rlsdk.errors import ConfigError, DataError, RunError
from rlsdk.isolation.vitals import Identity
from rlsdk.isolation.watching import RECORDER, now
from rlsdk.rollout.scheduler import UnfinishedError
from rlsdk.types import Group, Rollout, Score, Task
from rlsdk.workers.orders import (
    Admit,
    Cancel,
    Command,
    Dismiss,
    Drain,
    EngineDied,
    GroupOrder,
    Hold,
    Interrupt,
    Logged,
    Made,
    MadeGroup,
    Make,
    MakerCounters,
    Notice,
    Release,
    Resume,
    Spent,
    WorkerReport,
    made_in_order,
)
from rlsdk.workers.pool import RolloutWorkerPool

TASK = Task(id="t", prompt="1+1=")
ENGINE = "the handle of engine 0"


class Remote:
    """A method that is called as Ray calls it."""

    def __init__(self, method: Any) -> None:
        self.remote = method

    def options(self, **_: Any) -> Remote:
        return self


class Actor:
    """Lives in this process, records its commands, and does as the test says."""

    def __init__(self) -> None:
        self.heard: list[Command] = []
        self.says: asyncio.Queue[WorkerReport | Exception] = asyncio.Queue()
        self.take, self.answers = Remote(self._take), Remote(self._answers)
        self.identity = Remote(self._identity)
        self.node = "old"

    def _take(self, serial: int, commands: Sequence[Command]) -> None:
        self.heard += commands

    async def _answers(self) -> AsyncIterator[asyncio.Future[WorkerReport]]:
        while True:
            said = await self.says.get()
            if isinstance(said, Exception):
                raise said
            future: asyncio.Future[WorkerReport] = asyncio.get_running_loop().create_future()
            future.set_result(said)
            yield future

    async def _identity(self) -> Identity:
        return Identity(pid=1, started=0.0, host="", machine="", node=self.node)

    def kinds(self) -> list[type]:
        return [type(command) for command in self.heard]

    def orders(self) -> list[Make]:
        return [command for command in self.heard if isinstance(command, Make)]

    def say(self, *answers: tuple[int, Any], notices: Sequence[Notice] = (), wasted: int = 0) -> None:
        self.says.put_nowait(WorkerReport(MakerCounters(wasted=wasted), list(answers), list(notices)))

    def make_all(self) -> None:
        """Answer every order with a group of its name."""
        self.say(*((each.number, Made(MadeGroup(group(each.order.key)))) for each in self.orders()))
        self.heard.clear()


class StartedPool:
    """Two workers, and those that replace them."""

    def __init__(self, tmp_path: Path, engines: Sequence[Any] = (ENGINE,), most: int = 1) -> None:
        self.actors = [Actor(), Actor()]
        self.seen: list[tuple[Rollout, Score, int]] = []
        self.starts: list[tuple[int, int]] = []
        self.ready: Callable[[], Any] = partial(asyncio.sleep, 5)
        self.pool = RolloutWorkerPool(
            self._start,
            list(self.actors),
            engines,
            most=most,
            logs=tmp_path,
            observer=lambda *each: self.seen.append(each),
        )

    async def _start(self, rank: int, incarnation: int) -> tuple[Any, Any]:
        self.starts.append((rank, incarnation))
        self.actors[rank] = Actor()
        return self.actors[rank], self.ready()


def group(key: str) -> Group:
    return Group(TASK, (Rollout.from_text(TASK, "2"),), (Score(1.0),), uid=key)


def order(key: str, size: int = 1) -> GroupOrder:
    return GroupOrder(task=TASK, key=key, size=size)


@pytest.fixture(autouse=True)
def no_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing here is an actor of Ray, which other tests of this process may have started."""
    monkeypatch.setattr("rlsdk.workers.actor.kill", lambda actor: None)


@pytest.fixture
def started(tmp_path: Path) -> StartedPool:
    return StartedPool(tmp_path)


async def begin(pool: RolloutWorkerPool, *keys: str) -> list[asyncio.Task[MadeGroup]]:
    tasks = [asyncio.ensure_future(pool.make(order(key))) for key in keys]
    await asyncio.sleep(0.01)
    return tasks


async def test_each_group_goes_to_the_worker_that_owes_the_fewest_rollouts(started: StartedPool) -> None:
    big = asyncio.ensure_future(started.pool.make(order("big", 5)))
    others = await begin(started.pool, *"abcd")
    assert [[each.order.key for each in actor.orders()] for actor in started.actors] == [["big"], [*"abcd"]]
    assert started.actors[1].kinds() == [Admit, Make, Make, Make, Make]
    for actor in started.actors:
        actor.make_all()
    assert [(await each).group.uid for each in [big, *others]] == ["big", *"abcd"]
    await begin(started.pool, "e")
    assert [each.order.key for each in started.actors[0].orders()] == ["e"]  # nothing is owed any more


async def test_groups_of_a_dead_worker_are_made_by_another_and_a_replacement_takes_part(
    started: StartedPool, caplog: pytest.LogCaptureFixture
) -> None:
    tasks = await begin(started.pool, "a", "b")
    started.actors[0].say(wasted=3)
    started.actors[0].says.put_nowait(ActorDiedError())
    await asyncio.sleep(0.01)
    assert [each.order.key for each in started.actors[1].orders()] == ["b", "a"]
    started.actors[1].make_all()
    assert [(await each).group.uid for each in tasks] == ["a", "b"]
    assert (
        len(started.pool.failures) == 1
        and started.pool.failures[0] in caplog.text
        and "rollout worker 0" in caplog.text
    )
    assert started.pool.counters().wasted == 3  # what the dead one had counted stays
    await asyncio.sleep(6)
    assert started.starts == [(0, 1)]
    await begin(started.pool, "c")
    assert started.actors[0].kinds() == [Admit, Make]


async def test_groups_wait_while_no_worker_lives(started: StartedPool) -> None:
    tasks = await begin(started.pool, "a", "b")
    for actor in list(started.actors):
        actor.says.put_nowait(ActorDiedError())
    await asyncio.sleep(6)
    assert sorted(each.order.key for actor in started.actors for each in actor.orders()) == ["a", "b"]
    for actor in started.actors:
        actor.make_all()
    assert [(await each).group.uid for each in tasks] == ["a", "b"]


async def test_a_worker_that_dies_too_often_fails_the_run(started: StartedPool) -> None:
    tasks = await begin(started.pool, "a")
    for _ in range(2):
        started.actors[0].says.put_nowait(ActorDiedError())
        await asyncio.sleep(6)
        await begin(started.pool, "another")
    with pytest.raises(RunError, match=r"rollout worker 0 died 2 times; a run survives placement\.engine_restarts=1"):
        await tasks[0]
    with pytest.raises(RunError, match="died 2 times"):
        await started.pool.make(order("b"))


async def test_a_replacement_that_ray_places_on_a_dead_node_is_no_further_death(
    started: StartedPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    lost = [
        ActorDiedError(ActorDiedErrorContext(actor_id=bytes(16), error_message="its node has died", never_started=True))
    ] * 2

    async def ready() -> None:
        await asyncio.sleep(10)
        if lost:
            raise lost.pop()

    started.ready = ready
    monkeypatch.setattr("rlsdk.workers.pool.kill", lambda actor: None)
    await begin(started.pool, "a", "b")
    started.actors[0].says.put_nowait(ActorDiedError())
    await asyncio.sleep(31)
    assert started.starts == [(0, 1), (0, 2), (0, 3)] and len(started.pool.failures) == 1
    await begin(started.pool, "c")
    assert started.actors[0].kinds() == [Admit, Make]


async def test_what_a_group_raises_in_a_worker_is_raised_here(started: StartedPool) -> None:
    [failing, unfinished] = await begin(started.pool, "a", "b")
    [first], [second] = (actor.orders() for actor in started.actors)
    started.actors[0].say((first.number, ConfigError(["tasks: the task is wrong"])))
    seen = (Rollout.from_text(TASK, "3"), Score(0.0), 4)
    started.actors[1].say((second.number, Made(MadeGroup(group("part")), unfinished=True, seen=(seen,))))
    with pytest.raises(ConfigError, match="the task is wrong"):
        await failing
    with pytest.raises(UnfinishedError) as raised:
        await unfinished
    assert raised.value.group.uid == "part"
    assert started.seen == [seen]


async def test_a_task_that_cannot_be_sent_to_a_worker_ends_the_run_and_is_named(started: StartedPool) -> None:
    """Ray pickles the arguments of a call before it sends it."""
    for actor in started.actors:
        actor.take = Remote(lambda serial, commands: cloudpickle.dumps(commands))
    odd = Task(id="odd", prompt="1+1=", metadata={"lock": threading.Lock()}, source="mine")
    making = started.pool.make(GroupOrder(task=odd, key="a", size=1))
    with pytest.raises(DataError, match="task 'odd' of source 'mine' cannot be sent to another process"):
        await asyncio.wait_for(making, 5)


async def test_a_group_without_a_waiting_caller_is_ended_and_its_late_answer_ignored(started: StartedPool) -> None:
    [task] = await begin(started.pool, "a")
    task.cancel()
    await asyncio.sleep(0.01)
    number = started.actors[0].orders()[0].number
    assert started.actors[0].heard[-1] == Cancel(number)
    started.actors[0].make_all()
    await asyncio.sleep(0.01)
    assert task.cancelled() and started.seen == []


async def test_a_block_that_holds_begins_when_all_workers_hold_and_ends_holding_after_an_error(
    started: StartedPool,
) -> None:
    inside = asyncio.Event()

    async def publish() -> None:
        async with started.pool.held():
            inside.set()
            raise RuntimeError("a transfer broke off")

    publishing = asyncio.ensure_future(publish())
    await asyncio.sleep(0.01)
    holds = [actor.heard[-1] for actor in started.actors]
    assert all(isinstance(each, Hold) for each in holds)
    started.actors[0].say((holds[0].number, None))
    await asyncio.sleep(1)
    assert not inside.is_set()
    started.actors[1].say((holds[1].number, None))
    with pytest.raises(RuntimeError, match="broke off"):
        await publishing
    assert inside.is_set()
    await asyncio.sleep(0.01)
    assert [actor.heard[-1] for actor in started.actors] == [Resume(), Resume()]


async def test_a_worker_that_dies_need_not_hold_and_its_replacement_does_from_its_start(started: StartedPool) -> None:
    inside, done = asyncio.Event(), asyncio.Event()

    async def publish() -> None:
        async with started.pool.held():
            inside.set()
            await done.wait()

    publishing = asyncio.ensure_future(publish())
    await asyncio.sleep(0.01)
    started.actors[0].says.put_nowait(ActorDiedError())
    [hold] = [each for each in started.actors[1].heard if isinstance(each, Hold)]
    started.actors[1].say((hold.number, None))
    await asyncio.sleep(6)
    assert inside.is_set()
    assert started.actors[0].kinds() == [Admit, Hold]
    done.set()
    await publishing
    await asyncio.sleep(0.01)
    assert started.actors[0].kinds() == [Admit, Hold, Resume]


async def test_pauses_and_routes_reach_every_worker_and_those_that_start_later(started: StartedPool) -> None:
    await begin(started.pool, "a", "b")
    started.pool.interrupt()
    started.pool.dismiss(0)
    started.pool.admit(0, "another engine")
    await asyncio.sleep(0.01)
    assert all(actor.kinds()[-3:] == [Interrupt, Dismiss, Admit] for actor in started.actors)
    started.actors[0].says.put_nowait(ActorDiedError())
    await asyncio.sleep(6)
    first, second = started.actors[0].heard[:2]
    assert isinstance(first, Admit) and first.actor == "another engine" and isinstance(second, Interrupt)
    started.pool.release()
    started.pool.release()
    await asyncio.sleep(0.01)
    assert [actor.kinds().count(Release) for actor in started.actors] == [1, 1]
    draining = asyncio.ensure_future(started.pool.drain(0))
    await asyncio.sleep(0.01)
    for actor in started.actors:
        assert isinstance(actor.heard[-1], Drain)
        assert not draining.done()
        actor.say((actor.heard[-1].number, None))
        await asyncio.sleep(0.01)
    await draining


async def test_the_death_of_an_engine_is_reported_once_without_earlier_deaths(
    started: StartedPool, caplog: pytest.LogCaptureFixture
) -> None:
    lost: list[tuple[int, Any, str]] = []

    def lose(rank: int, actor: Any, error: Exception) -> None:
        lost.append((rank, actor, str(error)))
        started.pool.dismiss(rank)

    started.pool.lost = lose
    await begin(started.pool, "a", "b")
    [incarnation] = {each.incarnation for actor in started.actors for each in actor.heard if isinstance(each, Admit)}
    for actor in started.actors:
        actor.say(notices=[EngineDied(0, incarnation, "it crashed"), Logged("rlsdk.scoring", logging.WARNING, "slow")])
    await asyncio.sleep(0.01)
    started.pool.admit(0, "another engine")
    started.actors[1].say(notices=[EngineDied(0, incarnation, "it crashed")])
    await asyncio.sleep(0.01)
    assert lost == [(0, ENGINE, "it crashed")]
    assert "rollout worker 1: slow" in caplog.text


async def test_spans_of_a_worker_get_the_times_of_this_machines_clock(started: StartedPool) -> None:
    spans: list[tuple[str, str, float, float, dict[str, float]]] = []

    class Recorder:
        def add(self, *span: Any) -> None:
            spans.append(span)

    token = RECORDER.set(Recorder())
    try:
        waiting = await begin(started.pool, "a")
        before = now()
        started.actors[0].say(notices=[Spent("reward worker 0", "score", 3.0, {"rollouts": 2.0})])
        started.actors[0].make_all()
        await asyncio.gather(*waiting)
    finally:
        RECORDER.reset(token)
    [(actor, name, begun, ended, counts)] = spans
    assert (actor, name, counts) == ("reward worker 0", "score", {"rollouts": 2.0})
    assert before <= ended <= now() and ended - begun == pytest.approx(3.0, abs=0.1)


async def test_without_engines_a_pause_cancels(tmp_path: Path) -> None:
    assert StartedPool(tmp_path, engines=()).pool.pausable is None


async def test_groups_come_back_in_the_order_in_which_they_were_ordered(started: StartedPool) -> None:
    making = asyncio.ensure_future(made_in_order(started.pool, [order(key) for key in "abc"]))
    await asyncio.sleep(0.01)
    for actor in reversed(started.actors):
        actor.make_all()
        await asyncio.sleep(0.01)
    assert [each.uid for each in await making] == [*"abc"]


async def test_a_worker_on_a_draining_node_finishes_its_groups_and_is_started_elsewhere(
    started: StartedPool,
) -> None:
    started.actors[1].node = "stays"
    leaves, stays = started.actors
    tasks = await begin(started.pool, "a", "b")
    for _ in range(2):  # the nodes that are draining are told again and again
        await started.pool.leave([DrainingNode("old", "a node")])
    tasks += await begin(started.pool, "c", "d")
    assert [[each.order.key for each in actor.orders()] for actor in (leaves, stays)] == [["a"], ["b", "c", "d"]]
    assert started.starts == []
    for actor in (leaves, stays):
        actor.make_all()
    assert [(await each).group.uid for each in tasks] == [*"abcd"]
    await asyncio.sleep(6)
    assert started.starts == [(0, 1)] and started.pool.failures == []
    tasks = await begin(started.pool, "e")
    assert [each.order.key for each in started.actors[0].orders()] == ["e"]


async def test_groups_that_a_leaving_worker_has_not_made_in_time_are_made_once_by_another(started: StartedPool) -> None:
    started.actors[1].node = "stays"
    tasks = await begin(started.pool, "a", "b")
    leaves = started.actors[0]
    await started.pool.leave([DrainingNode("old", "a node", time.time() + HAND_BACK_SECONDS + 60)])
    await asyncio.sleep(50)
    assert [each.order.key for each in started.actors[1].orders()] == ["b"]
    await asyncio.sleep(11)
    assert [each.order.key for each in started.actors[1].orders()] == ["b", "a"]
    leaves.make_all()  # too late
    started.actors[1].make_all()
    assert [(await each).group.uid for each in tasks] == ["a", "b"]
    assert started.starts == [(0, 1)] and started.pool.failures == []


async def test_a_worker_that_dies_while_it_leaves_is_replaced_once(started: StartedPool) -> None:
    started.actors[1].node = "stays"
    tasks = await begin(started.pool, "a")
    leaves = started.actors[0]
    await started.pool.leave([DrainingNode("old", "a node")])
    leaves.says.put_nowait(ActorDiedError())
    await asyncio.sleep(6)
    assert [each.order.key for each in started.actors[1].orders()] == ["a"]
    started.actors[1].make_all()
    assert (await tasks[0]).group.uid == "a"
    await asyncio.sleep(6)
    assert started.starts == [(0, 1)] and len(started.pool.failures) == 1
