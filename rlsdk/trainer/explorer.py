"""The sampling side of a run: task sources, engines, evaluation, and the scheduler that produces groups.

It exchanges plain values with the trainer, so the same code runs in one program or in two.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import numpy as np

from rlsdk.cluster.nodes import DrainingNode, watch_nodes
from rlsdk.config import Plan
from rlsdk.config.rules import fresh_groups
from rlsdk.contracts import Completion, Sampling
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
    UnscoredEvaluationError,
    WeightSender,
)
from rlsdk.engines.canary import Canary
from rlsdk.engines.client import EngineClient, GenerateRequest
from rlsdk.engines.group import EngineGroup
from rlsdk.errors import RunError, ScoringError
from rlsdk.evaluation.evaluation import evaluate, evaluation_of, held_out
from rlsdk.rollout.buffer import DropLimit
from rlsdk.rollout.mixture import TaskStreams
from rlsdk.rollout.scheduler import RolloutScheduler
from rlsdk.rollout.staleness import StalenessPolicy
from rlsdk.rollout.step_batch import apply_filters
from rlsdk.rollout.task_ledger import TaskLedger
from rlsdk.scoring.outcome import check_budget
from rlsdk.trainer.metrics import raw_metrics
from rlsdk.types import Group, Task
from rlsdk.workers.orders import MOST_REASONS, GroupMaker, GroupOrder, made_in_order


class Explorer:
    """Sample the batches of a run with the weights that the learner publishes."""

    def __init__(
        self,
        plan: Plan,
        *,
        engines: EngineGroup,
        maker: GroupMaker,
        sampling: Sampling,
        streams: TaskStreams,
        canary: Canary,
        client: EngineClient | None = None,
    ) -> None:
        """Create an explorer; no task starts before the first `take`."""
        config, resolve = plan.config, plan.plugins.resolve
        self._plan, self._maker, self._sampling = plan, maker, sampling
        self._streams, self._canary, self._client = streams, canary, client
        self._eval_tasks = held_out(plan)
        self._filters = [resolve(reference) for reference in plan.filters]
        self.engines = engines
        self._ledger = TaskLedger(streams.names)
        self._limits = StalenessPolicy.of(config.rollout)
        most_empty = None if config.max_empty_steps is None else config.max_empty_steps * fresh_groups(config)
        self._scheduler = RolloutScheduler(
            self._ledger,
            self._limits,
            streams=streams,
            batch=fresh_groups(config),
            make=self._make,
            wanted=self._wanted,
            policy=resolve(plan.buffer),
            most_dropped=most_empty,
            stop=resolve(plan.stop),
            pausable=maker.pausable,
        )
        self._made: list[Group] = []
        self._dropped: list[Group] = []
        self._drop_limit = DropLimit(
            most_empty,
            "rollout.dynamic_sampling: algorithm.filters left out",
            "the model may solve all tasks or none, or the filters are too strict",
        )
        self._taken: TakenBatch | None = None  # not settled yet
        self._done = 0
        self._reseeds = True
        self._sampled_by_hand = 0
        self._watch: asyncio.Task[None] | None = None

    @property
    def eval_tasks(self) -> int:
        """Number of held-out tasks."""
        return len(self._eval_tasks)

    @property
    def canary_ids(self) -> np.ndarray:
        """Fixed tokens whose logprobs are compared after every sync, int64 `[k]`."""
        return self._canary.token_ids

    @property
    def failure(self) -> BaseException | None:
        """First exception that a task raised."""
        return self._scheduler.failure

    def _wanted(self, group: Group) -> bool:
        """Return True if the trainer gets this group; with dynamic sampling, filtered groups are replaced instead."""
        if not self._plan.config.rollout.dynamic_sampling:
            return True
        self._made.append(group)
        kept = bool(apply_filters([group], self._filters))
        if not kept:
            self._dropped.append(group)
        try:
            self._drop_limit.note(kept=kept)
        except RunError:
            check_budget(self._dropped, self._plan.config.max_invalid, self._done + 1)  # a likelier cause
            raise
        return kept

    async def tasks(self, places: Mapping[int, tuple[str, int]]) -> dict[int, Task]:
        """Return previously drawn tasks, except those of removed sources."""
        streams = self._streams
        return {n: streams[source].at(position) for n, (source, position) in places.items() if source in streams.names}

    async def restore(self, version: int, state: Mapping[str, Any], groups: Mapping[int, Group]) -> tuple[int, int]:
        """See `Rollouts.restore`."""
        self._done = version
        self._streams.restore(state["tasks"])
        self._maker.restore(state.get("rewards", {}))
        again = self._scheduler.restore(state["production"], groups)
        available, baselines = self._scheduler.unsettled(), state.get("baselines", {})
        for record in available:
            record.baseline = baselines.get(str(record.number))
        return len(available), again

    async def take(self, version: int) -> TakenBatch:
        """Wait for the batch of a step and return it; see `RolloutScheduler.take`."""
        self._done, self.engines.step = version, version + 1
        if self._watch is None:
            self._watch = asyncio.get_running_loop().create_task(watch_nodes(self._leave))
        limits = self._limits
        starts_now = limits.ahead < limits.interval and version % limits.interval == 0  # all that is requested
        # When running ahead, too, a resumed run or a task after an evaluation must not repeat random numbers.
        if starts_now or self._reseeds:
            await self.engines.reseed(self._plan.config.seed, version + 1)
            self._reseeds = False
        records = await self._scheduler.take(version)
        if self._taken is not None:  # the step is repeated
            return self._taken
        experts: list[Group] = []
        if self._plan.algorithm.rollouts == "mixed":  # the experts' demonstrations of the same tasks
            keyed = ((f"step {self._done + 1} expert/{i}", record.task) for i, record in enumerate(records))
            orders = [GroupOrder(task=task, key=key, size=1, role="expert") for key, task in keyed]
            experts = await made_in_order(self._maker, orders)
        if self._dropped:  # the trainer never sees replaced groups, so failed scores among them are counted here
            taken = [record.group for record in records if record.group is not None]
            check_budget([*taken, *self._dropped], self._plan.config.max_invalid, version + 1)
        metrics = {
            "tasks/dropped": float(self._streams.dropped),
            **self._streams.metrics(),
            **self.engines.metrics(),
            **raw_metrics(self._made if self._plan.scored else (), self._plan.separate_rewards),
        }
        greedy = {t.number: t.baseline for t in records if t.baseline is not None}
        self._taken = TakenBatch(records=tuple(records), greedy=greedy, experts=tuple(experts), metrics=metrics)
        # Only now, so that a step that fails above counts the same groups when it is repeated.
        self._made, self._dropped = [], []
        return self._taken

    def settle(self, taken: TakenBatch, states: Sequence[TaskStatus]) -> None:
        """Set the final status of the records in a batch whose step is done."""
        self._scheduler.settle(taken.records, states)
        self._taken = None
        self._done += 1

    async def publish(self, learner: WeightSender, version: int, *, updated: bool) -> float:
        """See `Rollouts.publish`."""
        async with nullcontext() if self._plan.config.rollout.in_flight else self._maker.held():
            return await self.engines.publish(learner, version, self._canary, updated=updated)

    async def sleep(self) -> None:
        """Put the engines to sleep if they share their devices with the learner."""
        if self.engines.shared:
            await self.engines.sleep()

    async def evaluate(self) -> Evaluation:
        """See `Rollouts.evaluate`."""
        section = self._plan.config.eval

        async def produce(tasks: Sequence[Task], sampling: Sampling, size: int, key: str) -> list[Group]:
            keyed = ((f"{key}/{i}", task) for i, task in enumerate(tasks))
            chosen: dict[str, Any] = {"size": size, "role": "evaluation", "sampling": sampling}
            return await made_in_order(self._maker, [GroupOrder(task=task, key=key, **chosen) for key, task in keyed])

        reseed, self._reseeds = partial(self.engines.reseed, self._plan.config.seed, 0), True
        answers = await evaluate(produce, self._eval_tasks, self._sampling, section, reseed=reseed)
        found = evaluation_of(answers, section.samples, scored=bool(self._plan.rewards))
        try:
            answers.check_scores(self._plan.config.max_invalid, f"evaluation at step {self._done}")
        except ScoringError as error:
            raise UnscoredEvaluationError(str(error), found) from error
        return found

    async def sample(
        self, prompts: Sequence[np.ndarray], sampling: Sampling | None, count: int, seed: int | None
    ) -> list[list[Completion]]:
        """See `SamplesPrompts.sample`; only the engines that this process calls can be sampled by hand."""
        client = self._client
        if client is None:
            raise RunError(
                "this run has no engine that the trainer's process calls: its algorithm samples nothing, or "
                "rollout.workers is set"
            )
        self._reseeds = True
        first, self._sampled_by_hand = self._sampled_by_hand, self._sampled_by_hand + len(prompts)
        # Requests of one group with equal prompts are merged, so each prompt is a group of its own.
        requests = [
            GenerateRequest(f"by hand {first + i}", prompt, sampling or self._sampling, seed=seed)
            for i, prompt in enumerate(prompts)
        ]
        answers = await asyncio.gather(*(client.sample(request) for request in requests for _ in range(count)))
        return [[answer.completion for answer in answers[i * count : (i + 1) * count]] for i in range(len(prompts))]

    async def snapshot(self) -> RolloutSnapshot:
        """Return the state for a checkpoint, as a consistent snapshot."""
        return RolloutSnapshot(self.state(), tuple(self._scheduler.unsettled()))

    def state(self) -> dict[str, Any]:
        """Return the state as plain JSON."""
        return {
            "tasks": self._streams.state(),
            "production": self._scheduler.state(),
            "baselines": {str(t.number): t.baseline for t in self._scheduler.unsettled() if t.baseline is not None},
            "rewards": self._maker.state(),
        }

    async def counters(self) -> RolloutCounters:
        """Return seconds and tokens so far."""
        clock = await self.engines.clock()
        return RolloutCounters(clock, self._ledger.wasted + self._maker.counters().wasted)

    async def scale(self, engines: int | None) -> EngineStatus:
        """Start scaling to the requested number of engines, as far as resources allow, without waiting."""
        refused = "" if engines is None else self.engines.resize(engines)
        return EngineStatus(len(self.engines), self.engines.alive, len(self.engines.lost), refused)

    def sources(self) -> dict[str, TaskCounts]:
        """Return the task counts of each source."""
        return {name: self._ledger.counts(name) for name in self._streams.names}

    async def pause(self) -> RolloutSummary:
        """Stop running tasks; the next `take` starts them again."""
        self._stop_watch()
        await self._scheduler.pause(self._plan.config.rollout.pause_timeout)
        return self.summary()

    def summary(self) -> RolloutSummary:
        """Return the counts of tasks, and what was lost so far."""
        found, failures = self._maker.counters(), self._maker.failures
        environments = {
            "workers_lost": found.environments_lost,
            "reasons": list(found.reasons),
            "rollouts_run_again": found.run_again,
        }
        workers = {"lost": len(failures), "reasons": failures[:MOST_REASONS]}
        return RolloutSummary(self.sources(), environments, self.engines.report(), rollout_workers=workers)

    async def close(self) -> None:
        """Stop running tasks, and end replacement engines."""
        self._stop_watch()
        try:
            await self._scheduler.pause(self._plan.config.rollout.pause_timeout)
        finally:
            self.engines.close()

    async def _leave(self, nodes: Sequence[DrainingNode]) -> None:
        """Start moving engines and rollout workers off draining nodes."""
        await asyncio.gather(self.engines.leave(nodes), self._maker.leave(nodes))

    def _stop_watch(self) -> None:
        if self._watch is not None:
            self._watch.cancel()
            self._watch = None

    async def _make(self, record: TaskRecord) -> Group:
        """Sample and score the group of a task and, if needed, the greedy answer for its baseline."""
        order = GroupOrder(
            task=record.task,
            key=f"task {record.number}.{record.attempts}",
            size=self._plan.config.group_size,
            step=self._done + 1,
            before=record.group,
            baseline="baseline_rewards" in self._plan.needs,
        )
        made = await self._maker.make(order)
        record.baseline = made.baseline
        return made.group
