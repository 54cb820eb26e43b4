"""Rollouts sampled in this process: sources of tasks, engines, rewards, environments and evaluation.

It exchanges plain values with the trainer: in one program they are handed over, between two they travel.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import attrs
import numpy as np

from rlsdk.config import Plan
from rlsdk.config.rules import fresh_groups
from rlsdk.contracts.rollouts import (
    EngineStatus,
    Evaluation,
    RolloutCounters,
    RolloutSnapshot,
    RolloutSummary,
    TakenBatch,
    TaskCounts,
    TaskRecord,
    TaskStatus,
    WeightSender,
)
from rlsdk.engines.canary import Canary
from rlsdk.engines.client import EngineClient
from rlsdk.engines.gate import PausableClient
from rlsdk.engines.group import EngineGroup
from rlsdk.environments.pool import EnvWorkerPool
from rlsdk.evaluation.evaluation import evaluate, figures, held_out
from rlsdk.rollout.chat import RolloutContext
from rlsdk.rollout.lifecycle import TaskLedger
from rlsdk.rollout.producer import RolloutGenerator
from rlsdk.rollout.production import RolloutScheduler, UnfinishedError
from rlsdk.rollout.staleness import StalenessPolicy
from rlsdk.rollout.stream import TaskStreams
from rlsdk.trainer.credit import apply_filters
from rlsdk.trainer.learning import Refills
from rlsdk.trainer.metrics import raw_metrics
from rlsdk.types import Group, Task

MOST_REASONS = 20
"""Number of reasons in the summary."""


class Explorer:
    """Samples the batches of a run with the weights that it receives.

    Attributes:
        engines: All engines.
        production: Scheduler that starts tasks and keeps their groups.
    """

    def __init__(
        self,
        plan: Plan,
        *,
        engines: EngineGroup,
        client: EngineClient | None,
        gate: PausableClient | None,
        setting: RolloutContext,
        eval_worlds: EnvWorkerPool | None,
        producer: RolloutGenerator,
        demonstrator: RolloutGenerator | None,
        evaluator: RolloutGenerator,
        streams: TaskStreams,
        canary: Canary,
    ) -> None:
        """Create an explorer; nothing runs before the first `take`.

        Args:
            plan: Checked configuration.
            engines: All engines.
            client: Client of the engines; None where nothing is sampled.
            gate: Pauses what is sampled; None where nothing is.
            setting: Tokenizer, sampling and environments of rollouts.
            eval_worlds: Environments of evaluations; None for those of the training.
            producer: Makes the groups to train on.
            demonstrator: Gives the demonstrations that are mixed in; None where none are.
            evaluator: Makes the groups of evaluations.
            streams: Sources of tasks.
            canary: Compares engines with the learner.
        """
        config, resolve = plan.config, plan.plugins.resolve
        self._plan, self._client, self._gate, self._setting = plan, client, gate, setting
        self._eval_worlds = eval_worlds
        self._producer, self._demonstrator, self._evaluator = producer, demonstrator, evaluator
        self._streams, self._canary = streams, canary
        self._eval_tasks = held_out(plan)
        self._filters = [resolve(reference) for reference in plan.filters]
        self.engines = engines
        self._ledger = TaskLedger(streams.names)
        self._limits = StalenessPolicy.of(config.rollout)
        most_empty = None if config.max_empty_steps is None else config.max_empty_steps * fresh_groups(config)
        self.production = RolloutScheduler(
            self._ledger,
            self._limits,
            streams=streams,
            batch=fresh_groups(config),
            make=self._make,
            wanted=self._wanted,
            policy=resolve(plan.buffer),
            most_dropped=most_empty,
            stop=resolve(plan.stop),
            pausable=gate,
        )
        self._baselines: dict[int, float] = {}
        self._made: list[Group] = []
        self._refills = Refills(most_empty)
        self._done = 0

    @property
    def eval_tasks(self) -> int:
        """Number of held-out tasks."""
        return len(self._eval_tasks)

    @property
    def canary_ids(self) -> np.ndarray:
        """int64 `[k]`: the fixed tokens whose logprobs are compared after every sync."""
        return self._canary.token_ids

    @property
    def failure(self) -> BaseException | None:
        """First exception that a task raised."""
        return self.production.failure

    def _wanted(self, group: Group) -> bool:
        """Return True if the trainer gets a group: always, unless tasks are to replace those that filters drop."""
        if not self._plan.config.rollout.dynamic_sampling:
            return True
        self._made.append(group)
        kept = bool(apply_filters([group], self._filters))
        self._refills.note(kept=kept)
        return kept

    async def tasks(self, places: Mapping[int, tuple[str, int]]) -> dict[int, Task]:
        """Return tasks that were drawn before, except those of removed sources.

        Args:
            places: Record number -> source and position of its task.
        """
        streams = self._streams
        return {n: streams.at(source, position) for n, (source, position) in places.items() if source in streams.names}

    async def restore(self, version: int, state: Mapping[str, Any], groups: Mapping[int, Group]) -> tuple[int, int]:
        """Restore from `snapshot().state`.

        Args:
            version: Number of steps done.
            state: State of a snapshot.
            groups: Record number -> its group, where stored; tasks of other records are sampled again.

        Returns:
            Number of groups restored, and number of tasks that are sampled again.
        """
        self._done = version
        self._streams.restore(state["tasks"])
        again = self.production.restore(state["production"], lambda tasks: {n: groups[n] for n in tasks if n in groups})
        self._baselines = {int(number): value for number, value in state.get("baselines", {}).items()}
        return len(self.production.available()), again

    async def take(self, version: int) -> TakenBatch:
        """Wait for the batch of a step, and return it; see `RolloutScheduler.take`.

        Args:
            version: Number of steps done.
        """
        self._done, self.engines.step = version, version + 1
        if not self._limits.ahead:
            await self.engines.reseed(self._plan.config.seed, version + 1)
        tickets = await self.production.take(version)
        greedy = {t.number: self._baselines.pop(t.number) for t in tickets if t.number in self._baselines}
        made, self._made = self._made, []
        metrics = {
            "tasks/dropped": float(self._streams.dropped),
            **self.engines.metrics(),
            **raw_metrics(made if self._plan.scored else ()),
        }
        experts: list[Group] = []
        if self._demonstrator is not None:  # the experts' demonstrations of the same tasks
            tasks = [ticket.task for ticket in tickets]
            experts = await self._demonstrator.produce(tasks, self._setting, 1, f"step {self._done + 1} expert")
        return TakenBatch(tickets=tuple(tickets), greedy=greedy, experts=tuple(experts), metrics=metrics)

    def settle(self, taken: TakenBatch, states: Sequence[TaskStatus]) -> None:
        """Set the final status of a batch that was taken, whose step is done."""
        self.production.settle(taken.tickets, states)
        self._done += 1

    async def publish(self, learner: WeightSender, version: int, *, updated: bool) -> float:
        """Publish new weights to the engines, and compare both; returns the canary's gap in nats.

        Args:
            learner: Learner that has the weights.
            version: Number of steps done.
            updated: True if the weights must have changed since the last publication.

        Raises:
            CanaryError: Engine and learner disagree.
            EngineError: An engine failed.
        """
        gate = None if self._plan.config.rollout.in_flight else self._gate
        async with nullcontext() if gate is None else gate.held():
            return await self.engines.publish(learner, version, self._canary, updated=updated)

    async def sleep(self) -> None:
        """Free the device for the learner, if both share it."""
        if self.engines.shared:
            await self.engines.sleep()

    async def evaluate(self) -> Evaluation:
        """Evaluate the weights that the engines have.

        Raises:
            ScoringError: More than the share `max_invalid` of the answers could not be scored.
        """
        section, setting = self._plan.config.eval, self._setting
        if self._eval_worlds is not None:
            setting = attrs.evolve(setting, worlds=self._eval_worlds)
        reseed = partial(self.engines.reseed, self._plan.config.seed, 0)
        answers = await evaluate(self._evaluator, self._eval_tasks, setting, section, reseed=reseed)
        answers.check_scores(self._plan.config.max_invalid, f"evaluation at step {self._done}")
        return figures(answers, section.samples, scored=bool(self._plan.rewards))

    async def snapshot(self) -> RolloutSnapshot:
        """Return the state for a checkpoint; nothing changes while it is taken."""
        return RolloutSnapshot(self.state(), tuple(self.production.available()))

    def state(self) -> dict[str, Any]:
        """Return the state as plain JSON."""
        return {
            "tasks": self._streams.state(),
            "production": self.production.state(),
            "baselines": {str(number): value for number, value in self._baselines.items()},
        }

    async def counters(self) -> RolloutCounters:
        """Return seconds and tokens so far."""
        unheard = 0 if self._client is None else self._client.unheard
        clock = await self.engines.clock()
        return RolloutCounters(clock, self._ledger.wasted + unheard + (0 if self._gate is None else self._gate.dropped))

    async def scale(self, engines: int | None) -> EngineStatus:
        """Scale to the requested number of engines, as far as there is room, without waiting for it."""
        refused = "" if engines is None else self.engines.resize(engines)
        return EngineStatus(len(self.engines), self.engines.alive, len(self.engines.lost), refused)

    def sources(self) -> dict[str, TaskCounts]:
        """Return the counts of each source of tasks."""
        return {name: self._ledger.counts(name) for name in self._streams.names}

    async def pause(self) -> RolloutSummary:
        """End running tasks; the next `take` starts them again."""
        await self.production.pause(self._plan.config.rollout.pause_timeout)
        return RolloutSummary(self.sources(), self._environments(), self.engines.report())

    async def close(self) -> None:
        """End running tasks, and the engines that replaced others."""
        try:
            await self.production.pause(self._plan.config.rollout.pause_timeout)
        finally:
            self.engines.close()

    def _environments(self) -> dict[str, Any]:
        pools = [self._setting.worlds, self._eval_worlds]
        lost = [event for pool in pools if isinstance(pool, EnvWorkerPool) for event in pool.lost]
        again = self._producer.run_again + self._evaluator.run_again
        return {"workers_lost": len(lost), "reasons": lost[:MOST_REASONS], "rollouts_run_again": again}

    async def _make(self, ticket: TaskRecord) -> Group:
        """Sample and score the group of a task and, where needed, the greedy answer for its baseline."""
        size, key, setting = self._plan.config.group_size, f"task {ticket.number}.{ticket.attempts}", self._setting
        async with asyncio.TaskGroup() as running:
            group = self._producer.group(ticket.task, setting, size, key, self._done + 1, ticket.group)
            task = running.create_task(group)
            greedy = None
            if "baseline_rewards" in self._plan.needs:
                plain = attrs.evolve(setting, sampling=attrs.evolve(setting.sampling, temperature=0.0))
                greedy = running.create_task(self._evaluator.group(ticket.task, plain, 1, f"{key} greedy"))
        if greedy is not None and greedy.result().rollouts[0].status == "aborted":
            raise UnfinishedError(task.result())
        if greedy is not None and greedy.result().scores[0].valid:
            self._baselines[ticket.number] = greedy.result().scores[0].value
        return task.result()
