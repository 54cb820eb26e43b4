"""An engine with the timing of a real one that computes nothing."""

from __future__ import annotations

import asyncio
import heapq
import itertools
import time
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import psutil

import rlsdk
from rlsdk.contracts import Completion, Sampling
from rlsdk.engines.client import Answer, GenerateRequest
from rlsdk.environments.pool import EnvWorkerPool
from rlsdk.plugins import Plugins
from rlsdk.rollout.chat import RolloutContext
from rlsdk.rollout.codec import ChatTokenizer
from rlsdk.rollout.generator import RolloutGenerator
from rlsdk.types import Task
from tests.environments.worlds_lab import latencies
from tests.rollout.codecs import plain

LAB = Path(__file__).with_name("worlds_lab.py")


class SimulatedEngine:
    """Samples so many tokens a second, shared evenly among the requests that it has, as continuous batching does."""

    def __init__(self, codec: ChatTokenizer, rate: float, tokens: int) -> None:
        """Make one.

        Args:
            codec: Of the tokens.
            rate: Tokens a second.
            tokens: Of one answer.
        """
        self._rate, self._tokens = rate, tokens
        self._ids = np.resize(codec.encode("1234567890"), tokens)
        self._text = codec.decode([self._ids])[0]
        self._active: list[tuple[float, int, asyncio.Future[Answer]]] = []
        self._order = itertools.count()
        self._clock = self._then = 0.0
        self._timer: asyncio.TimerHandle | None = None
        self.sampled = 0
        self.asked: list[int] = []

    def sample(self, request: GenerateRequest) -> asyncio.Future[Answer]:
        loop = asyncio.get_running_loop()
        self._advance(loop.time())
        self.asked.append(len(request.prompt))
        future: asyncio.Future[Any] = loop.create_future()
        heapq.heappush(self._active, (self._clock + self._tokens, next(self._order), future))
        self._schedule()
        return future

    def _advance(self, now: float) -> None:
        """`_clock` counts the tokens that a request would have which had been there all the time."""
        if self._active:
            self._clock += (now - self._then) * self._rate / len(self._active)
        self._then = now

    def _schedule(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        if self._active:
            left = (self._active[0][0] - self._clock) * len(self._active) / self._rate
            self._timer = asyncio.get_running_loop().call_later(max(left, 0.0), self._finish)

    def _finish(self) -> None:
        self._advance(asyncio.get_running_loop().time())
        while self._active and self._active[0][0] <= self._clock + 1e-6:
            _, _, future = heapq.heappop(self._active)
            self.sampled += self._tokens
            if not future.done():
                future.set_result(Answer(self._completion(), self._text, engine=0))
        self._schedule()

    def _completion(self) -> Completion:
        count = self._tokens
        return Completion(
            request="",
            index=0,
            token_ids=self._ids,
            logprobs=np.full(count, -0.5, np.float32),
            versions=np.zeros(count, np.int64),
            finish="stop",
        )


@attrs.frozen(kw_only=True)
class Load:
    """What is simulated.

    Attributes:
        environment: `waits` (on the event loop) or `sleeps` (in threads).
        groups: Of environments.
        group_size: Environments of each.
        turns: Answers of an episode.
        tokens: Of an answer.
        rate: Tokens a second of the engine.
        median: Seconds that half of all calls of environments take at most; lognormal with sigma 1.
        workers: Actors.
        threads: Of each.
    """

    environment: str = "waits"
    groups: int = 128
    group_size: int = 8
    turns: int = 8
    tokens: int = 16
    rate: float = 131_072
    median: float = 0.3
    workers: int = 1
    threads: int = 64

    @property
    def count(self) -> int:
        """Environments."""
        return self.groups * self.group_size

    @property
    def engine_seconds(self) -> float:
        """That all tokens take."""
        return self.count * self.turns * self.tokens / self.rate

    @property
    def chain_seconds(self) -> float:
        """Of the environment that takes longest."""
        each = self.count // self.workers
        return max(sum(latencies(number, self.median, self.turns)) for number in range(each))

    @property
    def ideal(self) -> float:
        """Seconds below which nobody can stay."""
        return max(self.engine_seconds, self.chain_seconds)


@attrs.frozen(kw_only=True)
class Took:
    """What it took.

    Attributes:
        seconds: Of wall time.
        threads: The most that driver and workers had at one time.
        megabytes: Likewise.
        asked: Tokens of the prompts, in the order in which the engine was asked; the last are the play's.
    """

    seconds: float
    threads: int
    megabytes: float
    asked: Sequence[int]


Play = Callable[[Load, RolloutGenerator, RolloutContext], Awaitable[None]]


async def side_by_side(load: Load, generator: RolloutGenerator, setting: RolloutContext) -> None:
    """As a training does it."""
    groups = await generator.produce(_tasks(load), setting, load.group_size, "load")
    assert all(r.status == "finished" and r.metrics["turns"] == load.turns for g in groups for r in g.rollouts)


async def in_lock_step(load: Load, generator: RolloutGenerator, setting: RolloutContext) -> None:
    """All answer, then all environments step, then all answer again."""
    engine, ids = setting.client, np.zeros(4, np.int64)
    assert engine is not None
    use = rlsdk.Use(f"worlds_lab/{load.environment}", {"median": load.median, "turns": load.turns})
    worlds = [setting.environments.open(use, seed, 120.0) for seed in range(load.count)]
    await asyncio.gather(*(world.reset() for world in worlds))
    for _ in range(load.turns):
        await asyncio.gather(*(engine.sample(GenerateRequest("lock step", ids, setting.sampling)) for _ in worlds))
        await asyncio.gather(*(world.step("1") for world in worlds))
    for world in worlds:
        world.close()


async def measure(load: Load, play: Play) -> Took:
    """Play with workers that are started before, and watch driver and workers meanwhile."""
    plugins = Plugins([LAB])
    pool = EnvWorkerPool(plugins, workers=load.workers, per_worker=load.count // load.workers, threads=load.threads)
    engine: Any = SimulatedEngine(plain(), load.rate, load.tokens)
    setting = RolloutContext(
        codec=plain(), client=engine, sampling=Sampling(max_tokens=32), max_length=1024, environments=pool
    )
    generator = RolloutGenerator(
        plugins.resolve(plugins.reference("workflow", "environment", {"step_timeout": 120.0})), None, 0
    )
    try:
        warm = Task(id="warm", prompt="", metadata={"seed": 0, "environment": {"use": "worlds_lab/plain"}})
        [group] = await generator.produce([warm], setting, 2 * load.workers, "warm")
        pids = {int(r.metrics["pid"]) for r in group.rollouts}
        assert len(pids) == load.workers
        processes = [psutil.Process(), *map(psutil.Process, pids)]
        watching = asyncio.create_task(_watch(processes))
        began = time.perf_counter()
        await play(load, generator, setting)
        seconds = time.perf_counter() - began
        watching.cancel()
        threads, memory = await watching
        return Took(seconds=seconds, threads=threads, megabytes=memory / 2**20, asked=engine.asked)
    finally:
        pool.close()


async def _watch(processes: list[psutil.Process]) -> tuple[int, int]:
    threads = memory = 0
    try:
        while True:
            threads = max(threads, sum(p.num_threads() for p in processes))
            memory = max(memory, sum(p.memory_info().rss for p in processes))
            await asyncio.sleep(0.5)
    except asyncio.CancelledError:
        return threads, memory


def _tasks(load: Load) -> list[Task]:
    use = {"use": f"worlds_lab/{load.environment}", "median": load.median, "turns": load.turns}
    return [Task(id=f"t{i}", prompt="", metadata={"seed": i, "environment": use}) for i in range(load.groups)]
