"""Environments in this process: isolation, and calls that hang, raise or end the process."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable

import psutil
import pytest

import rlsdk
from rlsdk.errors import DataError, PluginError
from rlsdk.marks import environment
from rlsdk.types import Observation, Step, Task


def on_seed(answers: dict[int, str]) -> Callable[[str], str]:
    """A policy that says something of its own where a seed was shown first."""
    return lambda text: answers.get(int(text.split(":")[0]), "1")


def test_environments_of_tasks_play_side_by_side(local) -> None:
    stage = local()
    groups = asyncio.run(stage.play([stage.task(i, name) for i in range(4) for name in ("plain", "locked")]))
    assert [s.value for g in groups for s in g.scores] == [1.0] * 8


def test_a_lock_lets_one_call_run_at_a_time_and_without_it_they_meet(local) -> None:
    stage = local()
    tasks = [stage.task(i, "locked") for i in range(16)]
    assert all(s.valid for g in asyncio.run(stage.play(tasks)) for s in g.scores)
    stage.worlds._specs._isolation = "thread"
    stage.worlds._specs._known.clear()
    groups = asyncio.run(stage.play(tasks))
    assert any("another is inside" in s.reason for g in groups for s in g.scores)


def test_a_hung_call_under_the_lock_fails_later_calls_without_waiting(local) -> None:
    stage = local(step_timeout=0.5)
    began = time.perf_counter()
    groups = asyncio.run(stage.play([stage.task(i, "locked") for i in (5, 6, 7)], on_seed({5: "99"})))
    reasons = [g.scores[0].reason for g in groups]
    assert "environment 'worlds_lab/locked' (seed 5): step 1: it took longer than 0.5 s" in reasons[0]
    assert any("hangs and holds the lock" in reason for reason in reasons[1:])
    assert time.perf_counter() - began < 10


@pytest.mark.parametrize("isolation", ["thread", "lock", "process"])
@pytest.mark.parametrize("how", ["sync", "async"])
def test_an_environments_own_timeout_is_an_exception_of_its_code(local, isolation, how) -> None:
    async def go() -> None:
        host = local()
        host.worlds._specs._isolation = isolation
        name = "worlds_lab/plain" if how == "sync" else "worlds_lab/waits"
        options = {} if how == "sync" else {"median": 0.001}
        first, second = (host.worlds.open(rlsdk.Use(name, options), seed, 5.0) for seed in (1, 2))
        for world in (first, second):
            await world.reset()
        with pytest.raises(RuntimeError, match=r"\(seed 1\): step 1 raised TimeoutError: a server is silent"):
            await first.step("55")
        await second.step("1")  # nobody holds a lock
        first.close()
        second.close()

    asyncio.run(go())


def test_separate_processes_are_killed_when_they_hang_and_fail_alone_when_they_end(local, tmp_path) -> None:
    stage = local(step_timeout=1.5)
    tasks = [stage.task(i, "apart", folder=str(tmp_path)) for i in range(5)]
    groups = asyncio.run(stage.play(tasks, on_seed({1: "99", 2: "88", 3: "77"})))
    reasons = [g.scores[0].reason for g in groups]
    assert [g.scores[0].valid for g in groups] == [True, False, False, False, True]
    for seed in (1, 2):
        assert f"(seed {seed}): step 1: it took longer than 1.5 s and was killed" in reasons[seed]
    assert "(seed 3): step 1 raised RuntimeError: its process ended: " in reasons[3]
    pids = {int(note.name.split("-")[2]) for note in tmp_path.glob("reset-*")}
    assert len(pids) == 5 and os.getpid() not in pids
    assert groups[0].rollouts[0].metrics["pid"] in pids
    end = time.monotonic() + 10
    while any(psutil.pid_exists(pid) for pid in pids):
        assert time.monotonic() < end
        time.sleep(0.05)


def test_processes_pass_on_what_was_raised_and_close_what_ends(local, tmp_path) -> None:
    stage = local()

    async def go() -> list[str]:
        tasks = [stage.task(i, "apart", folder=str(tmp_path)) for i in (4, 5, 666)]
        groups = await stage.play(tasks, on_seed({5: "13"}))
        for _ in range(100):
            if len(list(tmp_path.glob("close-*"))) == 3:
                break
            await asyncio.sleep(0.05)
        return [g.scores[0].reason for g in groups]

    reasons = asyncio.run(go())
    assert reasons[0] == ""
    assert "environment 'worlds_lab/apart' (seed 5): step 1 raised ValueError: unlucky" in reasons[1]
    assert "environment 'worlds_lab/apart' (seed 666): reset raised ValueError: no such level" in reasons[2]
    assert sorted(n.name.split("-")[1] for n in tmp_path.glob("close-*")) == ["4", "5", "666"]


def test_async_environments_are_awaited_and_cut_off(local) -> None:
    stage = local(step_timeout=0.5)
    tasks = [stage.task(i, "waits", median=0.001, turns=2) for i in range(20)]
    groups = asyncio.run(stage.play(tasks))
    assert [g.scores[0].value for g in groups] == [2.0] * 20
    [group] = asyncio.run(stage.play(tasks[:1], lambda _: "99"))
    assert "step 1: it took longer than 0.5 s" in group.scores[0].reason


@pytest.mark.parametrize("where", ["chat", "branch"])
def test_what_a_workflow_does_not_leave_is_left_at_its_end(local, tmp_path, where) -> None:
    stage = local()

    @rlsdk.workflow("forgets")
    async def forgets(task, chat):
        opens = chat.branch() if where == "branch" else chat
        world = opens.world(rlsdk.Use("worlds_lab/plain", {"folder": str(tmp_path)}), 7)
        chat.say((await world.reset()).text)
        await chat.sample()
        return chat.finish()

    async def go() -> None:
        stage.generator._run = rlsdk.load("workflow", forgets)
        await stage.play([Task(id="a", prompt="")])
        for _ in range(100):
            if list(tmp_path.glob("close-7-*")):
                break
            await asyncio.sleep(0.02)

    asyncio.run(go())
    assert len(list(tmp_path.glob("close-7-*"))) == 1


@pytest.mark.parametrize("name", ["plain", "apart"])
def test_a_second_reset_closes_the_first_environment(local, tmp_path, name) -> None:
    async def go() -> None:
        world = local().worlds.open(rlsdk.Use(f"worlds_lab/{name}", {"folder": str(tmp_path)}), 7, 5.0)
        for _ in range(2):
            assert (await world.reset()).text == "7:"
            assert (await world.step("1")).observation.text == "1:"
        for _ in range(100):
            if list(tmp_path.glob("close-*")):
                break
            await asyncio.sleep(0.02)
        assert len(list(tmp_path.glob("close-7-*"))) == 1
        world.close()

    asyncio.run(go())


@pytest.mark.parametrize("name", ["plain", "apart"])
@pytest.mark.parametrize("limit", ["of the step", "of the workflow"])
def test_no_call_follows_an_abandoned_one_until_the_environment_is_reset(local, name, limit) -> None:
    async def go() -> None:
        seconds = 0.1 if limit == "of the step" else 5.0
        world = local().worlds.open(rlsdk.Use(f"worlds_lab/{name}"), 7, 5.0)
        await world.reset()
        world._seconds = seconds
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.1 if limit == "of the workflow" else 5.0):
                await world.step("99")
        with pytest.raises(RuntimeError, match="while an earlier call is running"):
            await world.step("1")
        world._seconds = 5.0
        await world.reset()
        assert (await world.step("1")).observation.text == "1:"
        with pytest.raises(RuntimeError, match="while an earlier call is running"):
            await asyncio.gather(world.step("99"), world.step("1"))  # the first takes long
        world.close()

    asyncio.run(go())


def test_a_task_without_an_environment_says_what_to_do(local) -> None:
    stage = local()
    for metadata, words in (
        ({}, "task 'a' names no environment .* set workflow.environment"),
        ({"environment": {"id": 3}}, "task 'a': metadata 'environment' does not name a component"),
    ):
        with pytest.raises(ExceptionGroup) as caught:
            asyncio.run(stage.play([Task(id="a", prompt="", metadata=metadata)]))
        assert caught.group_contains(DataError, match=words)
    with pytest.raises(ExceptionGroup) as caught:
        asyncio.run(stage.play([Task(id="a", prompt="", metadata={"environment": "worlds_lab/plane"})]))
    assert caught.group_contains(PluginError, match="did you mean 'worlds_lab/plain'")


def test_a_mark_says_how_environments_are_kept_apart() -> None:
    with pytest.raises(PluginError, match="isolation must be one of thread, lock, process; got 'cell'"):
        environment("x", isolation="cell")  # type: ignore[arg-type]


def test_reset_that_takes_too_long_fails_by_name(local) -> None:
    @rlsdk.environment("stuck")
    class Stuck:
        """Never begins."""

        def reset(self, seed: int) -> Observation:
            time.sleep(2)
            return Observation("")

        def step(self, text: str) -> Step:
            return Step(Observation(""))

    stage = local(environment=Stuck, step_timeout=0.3)
    [group] = asyncio.run(stage.play([Task(id="a", prompt="", metadata={"seed": 4})]))
    assert group.scores[0].reason == (
        "workflow failed: TimeoutError: environment 'stuck' (seed 4): reset: it took longer than 0.3 s"
    )
