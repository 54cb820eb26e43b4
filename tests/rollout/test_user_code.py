"""Users' workflows, tools, agents and rewards block only their own event loop."""

from __future__ import annotations

import asyncio
import itertools
import threading
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import rlsdk
from rlsdk.components import Use
from rlsdk.contracts import Chat, RewardSpec, Sampling, runs_user_code
from rlsdk.engines.client import Answer, GenerateRequest
from rlsdk.loops import UserLoop
from rlsdk.rollout.chat import RolloutContext
from rlsdk.rollout.generator import RolloutGenerator
from rlsdk.scoring.scorer import RewardTerm, Scorer
from rlsdk.serving.recording import Recorder
from rlsdk.testing import ScriptedPolicy
from rlsdk.types import Group, Message, Observation, Rollout, Score, Step, Task
from tests.rollout.codecs import chatml

SECONDS = 60.0
LAB = """
import json, threading, urllib.request

blocked, release = threading.Event(), threading.Event()

async def wait() -> str:
    "Wait."
    blocked.set()
    assert release.wait(60)
    return "waited"

def sync() -> str:
    "Do nothing."
    return "done"

async def blocking_agent(task, base_url, api_key):
    body = json.dumps({"messages": [{"role": "user", "content": task.prompt[0].content}]}).encode()
    request = urllib.request.Request(f"{base_url}/chat/completions", body, {"content-type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as reply:  # on a loop that it shares with the endpoint: a deadlock
        return {"reward": 1.0, "answer": json.load(reply)["choices"][0]["message"]["content"]}

async def async_agent(task, base_url, api_key): ...
def sync_agent(task, base_url, api_key): ...
def parse(text): return []
"""


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> str:
    path: Path = tmp_path_factory.mktemp("lab") / "user_lab.py"
    path.write_text(LAB)
    return str(path)


@pytest.fixture
def user_loop() -> Iterator[UserLoop]:
    with UserLoop() as made:
        yield made


class Counting(ScriptedPolicy):
    """Notes how many answers are asked for in each turn of the event loop, and on which thread."""

    def __init__(self, script: Callable[[str], str]) -> None:
        super().__init__(chatml(), script)
        self.turns: list[int] = []
        self.threads: set[int] = set()
        self.seeds: list[int | None] = []
        self._open = False

    def sample(self, request: GenerateRequest) -> asyncio.Future[Answer]:
        if not self._open:
            self._open = True
            self.turns.append(0)
            asyncio.get_running_loop().call_soon(self._close)
        self.turns[-1] += 1
        self.threads.add(threading.get_ident())
        self.seeds.append(request.seed)
        return super().sample(request)

    def _close(self) -> None:
        self._open = False


def context(policy: Any, user_loop: UserLoop | None) -> RolloutContext:
    return RolloutContext(
        codec=chatml(),
        client=policy,
        sampling=Sampling(max_tokens=500),
        max_length=9000,
        user_loop=user_loop,
        recorder=Recorder,
    )


def task(name: str = "t") -> Task:
    return Task(id=name, prompt=[Message("user", "Question.")])


async def group(
    workflow: Any, where: RolloutContext, *, size: int = 1, scorer: Scorer | None = None, seed: int | None = None
) -> Group:
    return await RolloutGenerator(workflow, scorer, seed=seed).group(task(), where, size, "test")


def test_members_that_wait_before_their_first_request_do_not_share_its_seed(user_loop: UserLoop) -> None:
    waits = iter(range(4))

    async def talk(task: Task, chat: Chat) -> Rollout:
        for _ in range(next(waits)):
            await asyncio.sleep(0)
        await chat.sample()
        return chat.finish()

    policy = Counting(lambda _: "An answer.")
    asyncio.run(group(talk, context(policy, user_loop), size=4, seed=0))
    assert len(set(policy.seeds)) == 4 and None not in policy.seeds


def test_a_workflow_of_a_plugin_runs_on_its_own_loop_and_its_group_is_asked_for_at_once(user_loop: UserLoop) -> None:
    threads: set[int] = set()

    async def talk(task: Task, chat: Chat) -> Rollout:
        threads.add(threading.get_ident())
        await chat.sample()
        chat.say("Again.")
        other = chat.branch()
        await chat.sample()
        return other.finish() if threads is None else chat.finish()

    policy = Counting(lambda _: "An answer.")
    own = asyncio.run(group(talk, context(policy, user_loop), size=8))
    assert threading.get_ident() not in threads
    assert policy.threads == {threading.get_ident()}
    assert policy.turns[0] == 8  # one request of eight continuations
    again = asyncio.run(group(talk, context(Counting(lambda _: "An answer."), None), size=8))
    for mine, other in zip(own.rollouts, again.rollouts, strict=True):
        assert mine.messages == other.messages
        assert mine.token_ids.tolist() == other.token_ids.tolist()
        assert mine.loss_mask.tolist() == other.loss_mask.tolist()


def test_a_workflow_that_blocks_does_not_hold_up_the_rest_of_the_run(user_loop: UserLoop) -> None:
    blocked, release = threading.Event(), threading.Event()

    async def blocks(task: Task, chat: Chat) -> Rollout:
        await chat.sample()
        blocked.set()
        assert release.wait(SECONDS)
        return chat.finish()

    async def drive() -> None:
        where = context(Counting(lambda _: "An answer."), user_loop)
        slow = asyncio.create_task(group(blocks, where))
        assert await asyncio.to_thread(blocked.wait, SECONDS)
        quick = await group(rlsdk.load("workflow", "single_turn"), where)
        assert quick.rollouts[0].text == "An answer."
        assert not slow.done()
        release.set()
        assert (await slow).rollouts[0].status == "finished"

    asyncio.run(drive())


def test_an_async_tool_that_blocks_does_not_hold_up_the_rest_of_the_run(lab: str, user_loop: UserLoop) -> None:
    from rlsdk.plugins.discovery import find

    blocked, release = find(f"{lab}:blocked"), find(f"{lab}:release")
    workflow = rlsdk.load("workflow", "tools", tools=[f"{lab}:wait"], call_timeout=SECONDS)
    said = iter(['<tool_call>{"name": "wait"}</tool_call>', "Over."])

    async def drive() -> Group:
        slow = asyncio.create_task(group(workflow, context(Counting(lambda _: next(said)), user_loop)))
        assert await asyncio.to_thread(blocked.wait, SECONDS)
        release.set()  # nobody could, were the driver's loop blocked
        return await slow

    rollout = asyncio.run(drive()).rollouts[0]
    assert [m.content for m in rollout.messages if m.role == "tool"] == ["waited"]
    assert rollout.text == "Over."


def test_an_async_agent_may_use_a_client_that_blocks(lab: str, user_loop: UserLoop) -> None:
    workflow = rlsdk.load("workflow", "agent", agent=f"{lab}:blocking_agent", timeout=SECONDS)
    made = asyncio.run(group(workflow, context(Counting(lambda _: "An answer."), user_loop)))
    assert made.rollouts[0].status == "finished"
    assert made.rollouts[0].text == "An answer."
    assert made.rollouts[0].rewards


def test_a_rollout_cancelled_while_its_code_blocks_is_abandoned(
    user_loop: UserLoop, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rlsdk.loops.bridge.CANCEL_SECONDS", 0.05)
    blocked, release = threading.Event(), threading.Event()

    async def blocks(task: Task, chat: Chat) -> Rollout:
        blocked.set()
        assert release.wait(SECONDS)
        return chat.finish()

    async def drive() -> None:
        running = asyncio.create_task(group(blocks, context(Counting(lambda _: ""), user_loop)))
        assert await asyncio.to_thread(blocked.wait, SECONDS)
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        release.set()

    asyncio.run(drive())


def test_environments_and_scores_are_the_runs_own(user_loop: UserLoop) -> None:
    @rlsdk.environment("echo")
    class Echo:
        def reset(self, seed: int) -> Observation:
            return Observation(f"seed {seed}")

        def step(self, text: str) -> Step:
            return Step(Observation(f"heard {text}"), reward=1.0, terminated=True)

    async def play(task: Task, chat: Chat) -> Rollout:
        world = chat.world(Use(Echo), 7)
        chat.say((await world.reset()).text)
        answer = await chat.sample()
        step = await world.step(answer.content)
        world.close()
        assert (await chat.score()).value == 0.5
        return chat.finish(metrics={"reward": step.reward})

    threads: list[int] = []

    def half(rollout: Rollout) -> float:
        threads.append(threading.get_ident())
        return 0.5

    scorer = Scorer([RewardTerm(RewardSpec("half"), half)])
    made = asyncio.run(group(play, context(Counting(lambda _: "A word."), user_loop), scorer=scorer))
    assert made.rollouts[0].metrics["reward"] == 1.0
    assert made.rollouts[0].messages[0].content.endswith("seed 7")
    assert set(threads) == {threading.get_ident()}


def test_an_environment_given_by_its_bare_name_is_refused_with_what_to_write(user_loop: UserLoop) -> None:
    async def play(task: Task, chat: Chat) -> Rollout:
        chat.world("lab/echo", 7)  # type: ignore[arg-type]
        return chat.finish()

    made = asyncio.run(group(play, context(Counting(lambda _: "A word."), user_loop)))
    assert "annotate the workflow's option `environment: rlsdk.Use`" in made.scores[0].reason


@pytest.mark.parametrize("batch", [False, True, "group"])
def test_an_async_reward_that_blocks_does_not_hold_up_the_rest_of_the_run(batch: Any, user_loop: UserLoop) -> None:
    blocked, release = threading.Event(), threading.Event()

    @rlsdk.reward("blocks", batch=batch)
    async def blocks(rollout: Any) -> Any:
        blocked.set()
        assert release.wait(SECONDS)
        return [Score(1.0)] * len(rollout) if batch else 1.0

    async def drive() -> Group:
        scorer = Scorer([RewardTerm(RewardSpec("blocks"), rlsdk.load("reward", blocks))], user_loop=user_loop)
        where = context(Counting(lambda _: "An answer."), user_loop)
        scored = asyncio.create_task(group(rlsdk.load("workflow", "single_turn"), where, scorer=scorer, size=2))
        assert await asyncio.to_thread(blocked.wait, SECONDS)
        release.set()
        return await scored

    assert [score.value for score in asyncio.run(drive()).scores] == [1.0, 1.0]


def test_a_plain_reward_crosses_once_for_the_rollouts_that_end_together_and_fails_for_each_alone() -> None:
    crossings, threads = [], set()
    numbers = itertools.count()

    class CountingLoop(UserLoop):
        async def run(self, work: Callable[[], Awaitable[Any]]) -> Any:
            crossings.append(work)
            return await super().run(work)

    @rlsdk.reward("plain", runs="driver")
    def plain(rollout: Rollout) -> float:
        threads.add(threading.get_ident())
        number = next(numbers)
        if number == 2:
            raise KeyError("gone")
        if number == 3:
            raise SystemExit(3)
        return float(number)

    with CountingLoop() as user_loop:
        scorer = Scorer([RewardTerm(RewardSpec("plain"), rlsdk.load("reward", plain))], user_loop=user_loop)
        where = context(Counting(lambda _: "An answer."), user_loop)
        made = asyncio.run(group(rlsdk.load("workflow", "single_turn"), where, scorer=scorer, size=5))
    assert [score.value for score in made.scores if score.valid] == [0.0, 1.0, 4.0]
    assert "KeyError: 'gone'" in made.scores[2].reason
    assert "SystemExit: 3 (tests/rollout/test_user_code.py, line" in made.scores[3].reason
    assert len(crossings) == 1
    assert threading.get_ident() not in threads


def test_failures_are_reported_as_on_one_loop(user_loop: UserLoop) -> None:
    async def breaks(task: Task, chat: Chat) -> Rollout:
        await chat.sample()
        raise KeyError("gone")

    async def leaks(task: Task, chat: Chat) -> Rollout:
        raise asyncio.CancelledError

    async def leaves(task: Task, chat: Chat) -> Rollout:
        raise SystemExit(3)

    async def panics(task: Task, chat: Chat) -> Rollout:
        raise Panic("index out of bounds")

    class Panic(BaseException):
        """As the PanicException of libraries in Rust."""

    async def reasons() -> list[str]:
        where = context(Counting(lambda _: "An answer."), user_loop)
        return [(await group(each, where)).scores[0].reason for each in (breaks, leaks, leaves, panics)]

    broken, leaked, left, panicked = asyncio.run(reasons())
    assert "KeyError: 'gone'" in broken and "test_user_code.py" in broken
    assert "its code raised CancelledError" in leaked
    assert "SystemExit: 3" in left
    assert "Panic: index out of bounds" in panicked


def test_what_is_rlsdks_own_does_not_cross(lab: str) -> None:
    def load(name: str, **options: Any) -> Any:
        return rlsdk.load("workflow", name, **options)

    async def own(task: Task, chat: Chat) -> Rollout:
        return chat.finish()

    assert not runs_user_code(load("single_turn"))
    assert not runs_user_code(load("environment"))
    assert not runs_user_code(load("tools", tools=[f"{lab}:sync"]))
    assert not runs_user_code(load("agent", agent=f"{lab}:sync_agent"))
    assert not runs_user_code(rlsdk.load("reward", "countdown"))
    assert runs_user_code(own)
    assert runs_user_code(load("tools", tools=[f"{lab}:wait"]))
    assert runs_user_code(load("tools", tools=[f"{lab}:sync"], parser=f"{lab}:parse"))
    assert runs_user_code(load("agent", agent=f"{lab}:async_agent"))
