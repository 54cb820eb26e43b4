"""Simulated training: the real scheduler, task streams and step order, with models of engines and learner."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import attrs
import numpy as np

from rlsdk.config.rollout import RolloutSection
from rlsdk.contracts import Completion, Sampling, TaskList
from rlsdk.contracts.rollouts import TaskRecord, TaskStatus
from rlsdk.engines.client import EngineClient, GenerateRequest
from rlsdk.engines.pausable import PausableClient
from rlsdk.errors import RunError, ValueFault
from rlsdk.plurals import counted
from rlsdk.rollout.buffer import BufferPolicy, first_come
from rlsdk.rollout.chat import STATUS
from rlsdk.rollout.mixture import Source, TaskStreams
from rlsdk.rollout.scheduler import RolloutScheduler
from rlsdk.rollout.staleness import StalenessPolicy
from rlsdk.rollout.stream import TaskStream
from rlsdk.rollout.task_ledger import TaskLedger, sampled_tokens
from rlsdk.simulation.clock import VirtualLoop, run_virtually
from rlsdk.simulation.engine import SimulatedEngine, constant
from rlsdk.simulation.rates import Lengths, Rates
from rlsdk.trainer.ledger import ReplayBuffer, newly_trained
from rlsdk.types import Group, Rollout, Score, Task

PROMPT = np.zeros(1, np.int64)
DROPS = 1000
"""Groups in a row (at least ten batches) after which a buffer policy counts as dropping every group."""
TASKS = 1 << 20
"""Number of tasks of each source; their content does not matter."""


@attrs.frozen(kw_only=True)
class Setup:
    """Parameters of a simulation.

    Attributes:
        rates: Speeds of the parts.
        lengths: Lengths of responses.
        engines: Number of engines.
        learners: Number of ranks of the learner.
        batch: Tasks in a step.
        group: Rollouts per task.
        steps: Number of steps.
        rollout: Settings of running ahead, of syncs during sampling, and of replay.
        policy: Creates the buffer policy, for each simulation since it may have a state.
        stop: Creates the stop rule; None if batches must be complete.
        sources: Weight of each task source, by name.
        seed: Seed of the lengths.
        all_engines: Number of engines of the whole run, if this is a slice of it; 0 if it is not.

    Raises:
        ValueFault: Replay would leave no new group in a batch, or filters would drop all groups that dynamic sampling
            samples.
    """

    rates: Rates
    lengths: Lengths
    engines: int
    learners: int
    batch: int
    group: int
    steps: int = 20
    rollout: RolloutSection = RolloutSection()
    policy: Callable[[], BufferPolicy] = lambda: first_come
    stop: Callable[[], Callable[..., bool]] | None = None
    sources: Mapping[str, float] = attrs.field(factory=lambda: {"tasks": 1.0})
    seed: int = 0
    all_engines: int = 0

    def __attrs_post_init__(self) -> None:
        if self.fresh < 1:
            share = self.rollout.replay.share
            raise ValueFault(
                f"rollout.replay.share: {share} of a batch of {self.batch} leaves no new group; give a smaller share"
            )
        if self.rollout.dynamic_sampling and self.rates.filtered >= 1:
            raise ValueFault(
                "filtered is 1: filters drop every group, and with rollout.dynamic_sampling no batch is ever complete; "
                "give --rate filtered=SHARE below 1"
            )

    @property
    def fresh(self) -> int:
        """Number of groups per batch that are trained for the first time."""
        return self.rollout.replay.fresh(self.batch)

    @property
    def whole(self) -> int:
        """Engines of the whole run."""
        return self.all_engines or self.engines

    @property
    def warm_up(self) -> int:
        """Number of first steps to skip, in which rollouts build up their lead."""
        return min(StalenessPolicy.of(self.rollout).ahead + 2, self.steps // 2)


@attrs.frozen(kw_only=True)
class SimulationResult:
    """Results of a simulation, over the steps after the warm-up.

    Attributes:
        step: Mean seconds of a step.
        step_p95: 95th percentile of the seconds of a step.
        staleness: Mean over trained tokens of the steps between their weights and their training.
        staleness_max: Maximum staleness.
        engines_idle: Share of time in which an engine was idle, averaged over engines.
        learner_idle: Share of time in which the learner waited for rollouts.
        tokens_per_second: Trained tokens per second, including groups that are trained on again.
        wasted: Share of the sampled tokens that were never trained on.
        weights_gb_per_second: Weights sent to all nodes with engines, in 10⁹ bytes per second.
        turns: Number of event loop iterations: the work of the simulation.
    """

    step: float
    step_p95: float
    staleness: float
    staleness_max: int
    engines_idle: float
    learner_idle: float
    tokens_per_second: float
    wasted: float
    weights_gb_per_second: float
    turns: int = 0


@attrs.define
class _Counts:
    """Counts since the beginning of the run."""

    tokens: int = 0
    reused: int = 0
    staleness: float = 0.0
    wasted: int = 0
    busy: float = 0.0
    taking: float = 0.0
    syncs: int = 0


@attrs.define
class _Processes:
    """Processes that work sequentially, each free from a time on; work goes to the first free one."""

    free: list[float]

    async def work(self, seconds: float) -> None:
        """Wait until a process has done this much work."""
        now = asyncio.get_running_loop().time()
        first = min(range(len(self.free)), key=self.free.__getitem__)
        self.free[first] = max(self.free[first], now) + seconds
        await asyncio.sleep(self.free[first] - now)


class SimulatedTraining:
    """One simulated run; on a virtual event loop it takes no time, on a real one it sleeps."""

    def __init__(self, setup: Setup) -> None:
        """Create a run on the running event loop."""
        self._setup = setup
        engines = range(setup.engines)
        self._engines = [SimulatedEngine(setup.rates, setup.lengths, (setup.seed, i)) for i in engines]
        section, staleness = setup.rollout, StalenessPolicy.of(setup.rollout)
        self._client = EngineClient(self._engines, _no_text)
        self._pausable = PausableClient(self._client, _no_text, partial=section.partial_rollouts)
        self._sampling = Sampling(max_tokens=setup.lengths.limit)
        self._ledger = TaskLedger(list(setup.sources))
        self._random = np.random.default_rng([setup.seed, len(engines)])
        self._policy, self._drops = setup.policy(), 0
        tasks = TaskList(lambda i: Task(id=str(i), prompt=""), TASKS, ordered=True)
        self._scheduler = RolloutScheduler(
            self._ledger,
            staleness,
            streams=TaskStreams(
                [Source(name, w, TaskStream(tasks, 0, lambda _: 0, 0, "drop")) for name, w in setup.sources.items()]
            ),
            batch=setup.fresh,
            make=self._make,
            wanted=lambda group: not section.dynamic_sampling or _kept(group),
            policy=self._priority,
            stop=None if setup.stop is None else setup.stop(),
            pausable=self._pausable,
        )
        self._replay = ReplayBuffer(
            self._policy,
            count=setup.batch - setup.fresh,
            most_uses=section.replay.most_uses,
            young=staleness.young,
        )
        self._version = 0
        self._now = asyncio.get_running_loop().time
        self._totals = _Counts()
        self._oldest = 0
        workers, rates = section.workers, setup.rates
        self._makers, self._driver = _Processes([0.0] * max(1, workers)), _Processes([0.0])
        self._maker_seconds, self._ledger_seconds = rates.driver_seconds, rates.ledger_seconds if workers else 0.0

    async def run(self, progress: Callable[[int], None] = lambda done: None) -> SimulationResult:
        """Run all steps; `progress` is called before each with the number of steps done."""
        times: list[float] = []
        before, began = attrs.evolve(self._totals), self._now()
        while self._version < self._setup.steps:
            progress(self._version)
            if self._version == self._setup.warm_up:
                self._oldest = 0
                before, began = self._measured(), self._now()
            start = self._now()
            await self._step()
            times.append(self._now() - start)
        after, seconds = self._measured(), self._now() - began
        await self._scheduler.pause(self._setup.rollout.pause_timeout)
        return self._outcome(times[self._setup.warm_up :], before, after, seconds)

    async def _step(self) -> None:
        """Take, learn, settle, publish: the order of `Trainer.step`."""
        start = self._now()
        records = await self._scheduler.take(self._version)
        self._totals.taking += self._now() - start
        self._scheduler.settle(records, await self._learn(records))
        self._version += 1
        if self._version % self._setup.rollout.sync_interval == 0 or self._version == self._setup.steps:
            await self._publish()

    def _measured(self) -> _Counts:
        self._totals.wasted = self._ledger.wasted + self._client.unheard + self._pausable.dropped
        self._totals.busy = sum(engine.measure()[0] for engine in self._engines)
        return attrs.evolve(self._totals)

    def _outcome(self, times: Sequence[float], before: _Counts, after: _Counts, seconds: float) -> SimulationResult:
        setup, seconds = self._setup, max(seconds, 1e-12)
        tokens, wasted = after.tokens - before.tokens, after.wasted - before.wasted
        sampled = tokens - (after.reused - before.reused) + wasted
        loop = asyncio.get_running_loop()
        sent = (after.syncs - before.syncs) * setup.rates.nodes(setup.whole) * setup.rates.weights_bytes
        return SimulationResult(
            step=float(np.mean(times)),
            step_p95=float(np.percentile(times, 95)),
            staleness=(after.staleness - before.staleness) / max(tokens, 1),
            staleness_max=self._oldest,
            engines_idle=max(0.0, 1 - (after.busy - before.busy) / (seconds * setup.engines)),
            learner_idle=(after.taking - before.taking) / seconds,
            tokens_per_second=tokens / seconds,
            wasted=wasted / max(sampled, 1),
            weights_gb_per_second=sent / seconds / 1e9,
            turns=loop.turns if isinstance(loop, VirtualLoop) else 0,
        )

    async def _make(self, record: TaskRecord) -> Group:
        name = f"task {record.number}.{record.attempts}"
        half = self._setup.group * self._maker_seconds / 2  # before the requests, and after the answers
        await self._makers.work(half)
        asked = [self._pausable.sample(GenerateRequest(name, PROMPT, self._sampling)) for _ in range(self._setup.group)]
        answers = await asyncio.gather(*asked)
        await self._makers.work(half)
        await self._driver.work(self._setup.group * self._ledger_seconds)
        await asyncio.sleep(self._setup.rates.score_seconds)
        kept = self._random.random() >= self._setup.rates.filtered
        rollouts = [_rollout(record.task, answer.completion) for answer in answers]
        scores = [Score(float(kept and i % 2 == 0)) for i in range(len(rollouts))]
        return Group(record.task, rollouts, scores, uid=name)

    def _priority(self, group: Group, /, *, step: int, uses: int) -> float | None:
        """Return the policy's priority; raise if it drops every group, since the simulation would then never end."""
        priority = self._policy(group, step=step, uses=uses)
        self._drops = self._drops + 1 if priority is None else 0
        if self._drops > max(DROPS, 10 * self._setup.batch):
            raise RunError(
                f"rollout.buffer: the policy dropped {counted(self._drops, 'group')} in a row. Groups of a "
                "simulation have alternating rewards of 1 and 0, and no metrics; simulate with rollout.buffer=fifo"
            )
        return priority

    async def _learn(self, records: list[TaskRecord]) -> list[TaskStatus]:
        done, before = self._version, self._totals.tokens
        statuses = [
            TaskStatus.TRAINED if t.group is not None and _kept(t.group) else TaskStatus.FILTERED for t in records
        ]
        used = self._replay.draw(done)
        for record, status in zip(records, statuses, strict=True):
            if record.group is not None and status is TaskStatus.TRAINED:
                self._count(record.group)
        for each in used:
            self._totals.reused += self._count(each.group)
        self._replay.add(newly_trained(records, statuses, done + 1, {}), used)
        tokens = self._totals.tokens - before
        rates = self._setup.rates
        await asyncio.sleep(rates.switch_seconds + rates.learn(tokens, self._setup.learners) if tokens else 0.0)
        return statuses

    def _count(self, group: Group) -> int:
        """Count a group that is trained on now, and return its trained tokens."""
        for rollout in group.rollouts:
            age = self._version - rollout.policy_versions[rollout.loss_mask]
            self._totals.staleness += float(age.sum())
            self._oldest = max(self._oldest, int(age.max(initial=0)))
        tokens = sampled_tokens(group)
        self._totals.tokens += tokens
        return tokens

    async def _publish(self) -> None:
        rates, in_flight = self._setup.rates, self._setup.rollout.in_flight
        interrupted = 0 if in_flight else sum(engine.running for engine in self._engines)
        async with nullcontext() if in_flight else self._pausable.held():
            # An interrupted answer is returned and requested again, at the cost of another one.
            each = interrupted * self._maker_seconds / len(self._makers.free)
            await asyncio.gather(*(self._makers.work(each) for _ in self._makers.free))
            await asyncio.sleep(rates.sync_seconds)
            transfer = rates.transfer(self._setup.whole)
            for engine in self._engines:
                engine.load(self._version, transfer)
            self._totals.syncs += 1
            await asyncio.sleep(transfer)


def simulate(setup: Setup, progress: Callable[[int], None] = lambda done: None) -> SimulationResult:
    """Run a setup to its end in virtual time; `progress` is called before each step with the steps done."""

    async def run() -> SimulationResult:
        return await SimulatedTraining(setup).run(progress)

    return run_virtually(run())


def engines_alone(setup: Setup) -> Setup:
    """Return the setup with a learner and syncs that take no time; its seconds per step are the G of `max(G, T)`.

    Syncs interrupt no answer: an immediate learner syncs more often than any other, and would waste the most tokens.
    """
    no_learner: dict[str, Any] = {
        "token_seconds": 0.0,
        "learner_seconds": 0.0,
        "exchanged_bytes": 0.0,
        "switch_seconds": 0.0,
    }
    free = attrs.evolve(setup.rates, **no_learner, sync_seconds=0.0, weights_bytes=0.0)
    return attrs.evolve(setup, rates=free, rollout=attrs.evolve(setup.rollout, in_flight=True))


def learner_alone(setup: Setup) -> Setup:
    """Return the setup with engines that take no time; its seconds per step are the T of `max(G, T)`, with syncs."""
    no_driver: dict[str, Any] = {"score_seconds": 0.0, "driver_seconds": 0.0, "ledger_seconds": 0.0}
    free = attrs.evolve(setup.rates, step_seconds=1e-12, sequence_seconds=0.0, prompt_tokens=0, **no_driver)
    return attrs.evolve(setup, rates=free)


def synchronous(setup: Setup) -> Setup:
    """Return the setup with every batch sampled by the weights of the step before; filters and policy are kept."""
    rollout = setup.rollout
    section = RolloutSection(dynamic_sampling=rollout.dynamic_sampling, buffer=rollout.buffer)
    return attrs.evolve(setup, rollout=section, stop=None)


def _kept(group: Group) -> bool:
    return bool(group.scores and group.scores[0].value)


def _rollout(task: Task, sampled: Completion) -> Rollout:
    mask, status = constant(1, "bool", len(sampled.token_ids)), STATUS[sampled.finish]
    return Rollout(task, (), sampled.token_ids, mask, sampled.logprobs, sampled.versions, status)


def _no_text(token_ids: Sequence[np.ndarray]) -> list[str]:
    return [""] * len(token_ids)
