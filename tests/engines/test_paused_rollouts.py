"""Rollouts on an engine in a separate process, paused at any time (invariants 6, 9, 10, 11 and 12)."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from typing import Any

import pytest
import tiny

import rlsdk
from rlsdk.contracts import Model, RewardSpec, Sampling
from rlsdk.contracts.rollouts import TaskRecord, TaskStatus
from rlsdk.engines.client import EngineClient
from rlsdk.engines.pausable import PausableClient
from rlsdk.rollout.chat import RolloutContext
from rlsdk.rollout.codec import ChatTokenizer
from rlsdk.rollout.generator import RolloutGenerator
from rlsdk.rollout.scheduler import RolloutScheduler
from rlsdk.rollout.staleness import StalenessPolicy
from rlsdk.rollout.task_ledger import TaskLedger
from rlsdk.scoring.scorer import RewardTerm, Scorer
from rlsdk.types import Group, Rollout, Task

pytestmark = pytest.mark.stack
TOKENS, STEPS, BATCH, MEMBERS = 60, 4, 3, 2


@rlsdk.reward("judged")
class Judged:
    """Records the rollouts that it scores."""

    def __init__(self) -> None:
        self.rollouts: list[Rollout] = []

    def __call__(self, rollout: Rollout) -> float:
        self.rollouts.append(rollout)
        return 1.0


class Sums:
    """An endless source."""

    names = ("sums",)

    def __init__(self) -> None:
        self.drawn = 0

    def divide(self, count: int) -> dict[str, int]:
        return {"sums": count}

    def __getitem__(self, source: str) -> Sums:
        return self

    def draw(self) -> tuple[Task, int]:
        self.drawn += 1
        return self.at(self.drawn), self.drawn

    def at(self, position: int) -> Task:
        return Task(id=str(position), prompt=f"{position}+1=")

    def note(self, position: int, group: Group) -> None:
        """Nothing."""

    def repeat(self, position: int) -> None:
        """Nothing."""

    def learn(self) -> None:
        """Nothing."""


@pytest.mark.parametrize("partial", [True, False])
def test_whatever_pauses_every_group_is_made_once_of_whole_answers(
    vllm_engine: Any, model: Model, partial: bool
) -> None:
    async def body() -> None:
        actor = vllm_engine.actor
        await actor.load_weights.remote(tiny.original(model))
        rng, codec, judged, sums = random.Random(3), ChatTokenizer(tiny.make_tokenizer()), Judged(), Sums()
        pausable = PausableClient(EngineClient([actor], codec.decode), codec.decode, partial=partial)
        sampling = Sampling(max_tokens=TOKENS, ignore_eos=True)
        context = RolloutContext(codec=codec, client=pausable, sampling=sampling, max_length=128)
        scorer = Scorer([RewardTerm(RewardSpec("judged", 1.0), judged)])
        generator = RolloutGenerator(rlsdk.load("workflow", "single_turn"), scorer, seed=5)

        async def make(record: TaskRecord) -> Group:
            key = f"task {record.number}.{record.attempts}"
            return await generator.group(record.task, context, MEMBERS, key, before=record.group)

        ledger = TaskLedger(sums.names)
        scheduler = RolloutScheduler(
            ledger, StalenessPolicy(ahead=1, limit=99), batch=BATCH, streams=sums, make=make, pausable=pausable
        )
        taken: list[TaskRecord] = []
        for step in range(STEPS):
            for _ in range(2):
                waiting = asyncio.ensure_future(scheduler.take(step))
                await asyncio.wait([waiting], timeout=rng.uniform(0.01, 0.06))
                if waiting.done():
                    break
                waiting.cancel()
                await scheduler.pause(10.0, again=0.2)
                assert ledger.counts("sums").scheduled == 0
                for record in ledger.records("sums", TaskStatus.ABORTED):
                    assert record.group is not None  # nobody had to be cancelled
                    assert any(rollout.status == "aborted" for rollout in record.group.rollouts)
            groups = waiting.result() if waiting.done() and not waiting.cancelled() else await scheduler.take(step)
            taken += groups
            kept = [t.group for t in groups if t.group is not None]
            for rollout in (r for group in kept for r in group.rollouts):
                assert (rollout.status, int(rollout.loss_mask.sum())) == ("truncated", TOKENS)
                versions = rollout.policy_versions[rollout.loss_mask].tolist()
                assert versions == sorted(versions)
                assert partial or rollout.policy_versions.max() <= step
            scheduler.settle(groups, [TaskStatus.TRAINED] * len(groups))
            async with pausable.held(again=0.2):
                await actor.load_weights.remote(tiny.changed(model, step + 1))
        await scheduler.pause(10.0, again=0.2)
        assert Counter(t.number for t in taken).most_common(1)[0][1] == 1
        assert len(taken) == STEPS * BATCH
        assert not any(rollout.status == "aborted" for rollout in judged.rollouts)
        assert len({id(rollout) for rollout in judged.rollouts}) == len(judged.rollouts)
        assert (pausable.resumed > 0) is partial
        mixed = [r for r in judged.rollouts if len(set(r.policy_versions[r.loss_mask].tolist())) > 1]
        assert bool(mixed) is partial
        live = [record for name in sums.names for record in ledger.records(name, *TaskStatus)]
        assert len(live) + len(taken) == sums.drawn

    asyncio.run(asyncio.wait_for(body(), 60))
