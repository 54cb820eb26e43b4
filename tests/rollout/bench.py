"""A scheduler whose groups come from a script, without engines, processes or Ray."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any

from rlsdk.contracts.rollouts import TaskRecord, TaskStatus
from rlsdk.rollout.scheduler import RolloutScheduler
from rlsdk.rollout.staleness import StalenessPolicy
from rlsdk.rollout.task_ledger import TaskLedger
from rlsdk.types import Group, Rollout, Score, Status, Task


class Bench:
    """A scheduler whose groups take a given time, sampled by the weights that are there when they begin.

    It is its scheduler's pausable client, too: what is interrupted hands out what it has, and goes on from there.

    Attributes:
        names: Of its sources.
        drawn: Fresh tasks.
        started: Numbers of records, as they were started.
        noted: Source and position of each group that was noted, and `learn` before each batch.
        interrupts: How often it was told to end what runs.
        deaf: It does not listen.
    """

    names: Sequence[str] = ("a", "b")

    def __init__(
        self,
        limits: StalenessPolicy,
        seconds: Callable[[int], float] = lambda number: 0.01,
        *,
        valve: bool = False,
        batch: int = 4,
        **how: Any,
    ) -> None:
        self.ledger = TaskLedger(self.names)
        self.version = self.drawn = self.interrupts = 0
        self.started: list[int] = []
        self.noted: list[Any] = []
        self.seconds, self.deaf = seconds, False
        self._ended = asyncio.Event()
        how |= {"pausable": self} if valve else {}
        self.scheduler = RolloutScheduler(self.ledger, limits, streams=self, batch=batch, make=self.make, **how)

    def divide(self, count: int) -> dict[str, int]:
        return {"a": count - 1, "b": 1}

    def __getitem__(self, source: str) -> Any:
        methods = {name: partial(getattr(self, name), source) for name in ("draw", "at", "note", "repeat")}
        return SimpleNamespace(**methods)

    def draw(self, source: str) -> tuple[Task, int]:
        self.drawn += 1
        return self.at(source, self.drawn), self.drawn

    def at(self, source: str, position: int) -> Task:
        return Task(id=f"{source}{position}", prompt="x")

    def note(self, source: str, position: int, group: Group) -> None:
        self.noted.append((source, position))

    def repeat(self, source: str, position: int) -> None:
        self.noted.append(("repeat", source, position))

    def learn(self) -> None:
        self.noted.append("learn")

    def interrupt(self) -> None:
        self.interrupts += 1
        if not self.deaf:
            self._ended.set()

    def release(self) -> None:
        self._ended.clear()

    async def make(self, record: TaskRecord) -> Group:
        self.started.append(record.number)
        version, before = self.version, record.group
        there = [] if before is None else before.rollouts[0].policy_versions[1:].tolist()
        seconds = self.seconds(record.number)
        try:
            await asyncio.wait_for(self._ended.wait(), seconds)
        except TimeoutError:
            return group(record.task, [*there, version])
        return group(record.task, [*there, version], "aborted")

    async def step(self, step: int) -> list[TaskRecord]:
        taken = await self.scheduler.take(step)
        self.scheduler.settle(taken, [TaskStatus.TRAINED] * len(taken))
        self.version = step + 1
        return taken


def group(task: Task, versions: Sequence[int], status: Status = "finished") -> Group:
    """Of one rollout: a prompt of one token, and a token of each version."""
    count = len(versions)
    mask, logprobs = [False, *[True] * count], [0.0, *[-1.0] * count]
    rollout = Rollout(task, (), [1] * (count + 1), mask, logprobs, [-1, *versions], status)
    return Group(task, (rollout,), (Score.invalid("stopped") if status == "aborted" else Score(1.0),))
