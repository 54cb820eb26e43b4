"""A training whose engines and learner are models: the real production, streams, routing and order of steps."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext

import attrs
import numpy as np

from rlsdk.config.production import ProductionSection
from rlsdk.contracts import Completion, Sampling
from rlsdk.errors import RunError, ValueFault
from rlsdk.rollout.chat import STATUS
from rlsdk.rollout.client import EngineClient
from rlsdk.rollout.experience import Experience
from rlsdk.rollout.gate import Gate
from rlsdk.rollout.lifecycle import Lifecycle, State, Ticket, sampled_tokens
from rlsdk.rollout.production import Policy, Production, first_come
from rlsdk.rollout.stream import Source, TaskStream, TaskStreams
from rlsdk.sources.listing import TaskList
from rlsdk.trainer.course import Clock, Course, pace_of
from rlsdk.trainer.keeping import used_of
from rlsdk.trainer.simulation.clock import VirtualLoop, run_virtually
from rlsdk.trainer.simulation.engine import SimulatedEngine, constant
from rlsdk.trainer.simulation.rates import Lengths, Rates
from rlsdk.types import Group, Rollout, Score, Task

PROMPT = np.zeros(1, np.int64)
DROPS = 1000
"""Groups that a policy may drop one after the other, or ten batches of them; then it drops them all."""
TASKS = 1 << 20
"""Of each source; what they are does not matter."""


@attrs.frozen(kw_only=True)
class Setup:
    """What is simulated.

    Attributes:
        rates: How fast the parts are.
        lengths: How long responses get.
        engines: How many.
        learners: Ranks of the learner.
        batch: Tasks of a step.
        group: Rollouts of a task.
        steps: How many.
        production: How far rollouts may run ahead, what a sync does to those that run, which are trained again.
        policy: Makes `production.buffer`, anew for each simulation: it may keep a state.
        stop: Likewise `production.stop`; None: a batch is all of it.
        sources: Weight of each source of tasks, by name.
        seed: Of the lengths.

    Raises:
        ValueFault: No group of a batch would be new.
    """

    rates: Rates
    lengths: Lengths
    engines: int
    learners: int
    batch: int
    group: int
    steps: int = 20
    production: ProductionSection = ProductionSection()
    policy: Callable[[], Policy] = lambda: first_come
    stop: Callable[[], Callable[..., bool]] | None = None
    sources: Mapping[str, float] = attrs.field(factory=lambda: {"tasks": 1.0})
    seed: int = 0

    def __attrs_post_init__(self) -> None:
        if self.fresh < 1:
            share = self.production.replay.share
            raise ValueFault(f"production.replay.share: {share} of a batch of {self.batch} leaves no group that is new")

    @property
    def fresh(self) -> int:
        """Groups of a batch that are trained for the first time."""
        return self.production.replay.fresh(self.batch)

    @property
    def warm_up(self) -> int:
        """Steps at the beginning that count for nothing: those in which rollouts gain their lead."""
        return min(pace_of(self.production).ahead + 2, self.steps // 2)


@attrs.frozen(kw_only=True)
class Outcome:
    """What came of a simulation, over the steps behind the warm-up.

    Attributes:
        step: Mean seconds of a step.
        step_p95: Which 95 % of the steps stay below.
        staleness: Mean over trained tokens of the steps between their weights and their training.
        staleness_max: The greatest.
        engines_idle: Share of time in which an engine had nothing to do, mean over engines.
        learner_idle: Share of time in which the learner waited for rollouts.
        tokens_per_second: Trained tokens in a second, those of groups that are trained again included.
        wasted: Share of tokens that were sampled and never trained, of all that were sampled.
        weights_gb_per_second: Weights sent to all engines, 10⁹ bytes in a second.
        turns: Turns of the event loop, from the beginning: the work of the simulation.
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
class _Totals:
    """What has been counted since the beginning."""

    tokens: int = 0
    reused: int = 0
    staleness: float = 0.0
    wasted: int = 0
    busy: float = 0.0
    taking: float = 0.0
    syncs: int = 0


class SimulatedTraining:
    """One run; on a virtual clock it takes no time, on a real one it sleeps."""

    def __init__(self, setup: Setup) -> None:
        """Make one; to be called on an event loop.

        Args:
            setup: What is simulated.
        """
        self._setup = setup
        engines = range(setup.engines)
        self._engines = [SimulatedEngine(setup.rates, setup.lengths, (setup.seed, i)) for i in engines]
        section, pace = setup.production, pace_of(setup.production)
        self._client = EngineClient(self._engines, _no_text)
        self._gate = Gate(self._client, _no_text, partial=section.partial_rollouts)
        self._sampling = Sampling(max_tokens=setup.lengths.limit)
        self._book = Lifecycle(list(setup.sources))
        self._random = np.random.default_rng([setup.seed, len(engines)])
        self._policy, self._drops = setup.policy(), 0
        self._production = Production(
            self._book,
            pace,
            streams=_streams(setup.sources),
            batch=setup.fresh,
            make=self._make,
            wanted=lambda group: not section.dynamic_sampling or _kept(group),
            policy=self._priority,
            stop=None if setup.stop is None else setup.stop(),
            valve=self._gate,
        )
        self._experience = Experience(
            self._policy,
            count=setup.batch - setup.fresh,
            most_uses=section.replay.most_uses,
            young=pace.young,
        )
        self._course = Course(production=self._production, steps=setup.steps, sync_interval=section.sync_interval)
        self._now = asyncio.get_running_loop().time
        self._totals = _Totals()
        self._oldest = 0

    async def run(self) -> Outcome:
        """All steps; what came of them."""
        times: list[float] = []
        before, began = attrs.evolve(self._totals), self._now()
        while self._course.done < self._setup.steps:
            if self._course.done == self._setup.warm_up:
                self._oldest = 0
                before, began = self._measured(), self._now()
            clock, start = Clock(self._now), self._now()
            await self._course.step(clock, self._learn, self._publish)
            self._totals.taking += clock.seconds["take"]
            times.append(self._now() - start)
        after, seconds = self._measured(), self._now() - began
        await self._production.pause(self._setup.production.pause_timeout)
        return self._outcome(times[self._setup.warm_up :], before, after, seconds)

    def _measured(self) -> _Totals:
        self._totals.wasted = self._book.wasted + self._client.unheard + self._gate.dropped
        self._totals.busy = sum(engine.measure()[0] for engine in self._engines)
        return attrs.evolve(self._totals)

    def _outcome(self, times: Sequence[float], before: _Totals, after: _Totals, seconds: float) -> Outcome:
        setup, seconds = self._setup, max(seconds, 1e-12)
        tokens, wasted = after.tokens - before.tokens, after.wasted - before.wasted
        sampled = tokens - (after.reused - before.reused) + wasted
        loop = asyncio.get_running_loop()
        sent = (after.syncs - before.syncs) * setup.engines * setup.rates.weights_bytes
        return Outcome(
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

    async def _make(self, ticket: Ticket) -> Group:
        name = f"task {ticket.number}.{ticket.attempts}"
        asked = [self._gate.sample(name, PROMPT, self._sampling) for _ in range(self._setup.group)]
        answers = await asyncio.gather(*asked)
        await asyncio.sleep(self._setup.rates.score_seconds)
        kept = self._random.random() >= self._setup.rates.filtered
        rollouts = [_rollout(ticket.task, answer.completion) for answer in answers]
        return Group(ticket.task, rollouts, [Score(float(kept and i % 2 == 0)) for i in range(len(rollouts))])

    def _priority(self, group: Group, /, *, step: int, uses: int) -> float | None:
        """That of the policy, unless it drops all that there ever is: in virtual time that would have no end."""
        priority = self._policy(group, step=step, uses=uses)
        self._drops = self._drops + 1 if priority is None else 0
        if self._drops > max(DROPS, 10 * self._setup.batch):
            raise RunError(
                f"production.buffer: the policy dropped {self._drops} groups one after the other. Those of a "
                "simulation have rewards of 1 and 0 in turn and no metrics; simulate with production.buffer=fifo"
            )
        return priority

    async def _learn(self, tickets: list[Ticket]) -> list[State]:
        done, before = self._course.done, self._totals.tokens
        states = [State.TRAINED if t.group is not None and _kept(t.group) else State.FILTERED for t in tickets]
        used = self._experience.draw(done)
        for ticket, state in zip(tickets, states, strict=True):
            if ticket.group is not None and state is State.TRAINED:
                self._count(ticket.group)
        for each in used:
            self._totals.reused += self._count(each.group)
        self._experience.add(used_of(tickets, states, done + 1, {}))
        tokens = self._totals.tokens - before
        await asyncio.sleep(self._setup.rates.learn(tokens, self._setup.learners) if tokens else 0.0)
        return states

    def _count(self, group: Group) -> int:
        """Count a group that is trained now; its tokens that are."""
        for rollout in group.rollouts:
            age = self._course.done - rollout.policy_versions[rollout.loss_mask]
            self._totals.staleness += float(age.sum())
            self._oldest = max(self._oldest, int(age.max(initial=0)))
        tokens = sampled_tokens(group)
        self._totals.tokens += tokens
        return tokens

    async def _publish(self) -> None:
        rates, in_flight = self._setup.rates, self._setup.production.in_flight
        async with nullcontext() if in_flight else self._gate.held():
            await asyncio.sleep(rates.sync_seconds)
            for engine in self._engines:
                engine.load(self._course.done, rates.transfer)
            self._totals.syncs += 1
            await asyncio.sleep(rates.transfer)


def simulate(setup: Setup) -> Outcome:
    """Run a setup to its end in virtual time."""

    async def run() -> Outcome:
        return await SimulatedTraining(setup).run()

    return run_virtually(run())


def engines_alone(setup: Setup) -> Setup:
    """The same with a learner, and syncs, that take no time: its steps are the G of `max(G, T)`."""
    free = attrs.evolve(setup.rates, token_seconds=0.0, learner_seconds=0.0, sync_seconds=0.0, weights_bytes=0.0)
    return attrs.evolve(setup, rates=free)


def learner_alone(setup: Setup) -> Setup:
    """The same with engines that take no time: its steps are the T of `max(G, T)`, syncs included."""
    free = attrs.evolve(setup.rates, step_seconds=1e-12, sequence_seconds=0.0, prompt_tokens=0, score_seconds=0.0)
    return attrs.evolve(setup, rates=free)


def synchronous(setup: Setup) -> Setup:
    """The same with every batch made by the weights of the step before; filters and policy as they were."""
    production = setup.production
    section = ProductionSection(dynamic_sampling=production.dynamic_sampling, buffer=production.buffer)
    return attrs.evolve(setup, production=section, stop=None)


def _kept(group: Group) -> bool:
    return bool(group.scores and group.scores[0].value)


def _rollout(task: Task, sampled: Completion) -> Rollout:
    mask, status = constant(1, "bool", len(sampled.token_ids)), STATUS[sampled.finish]
    return Rollout(task, (), sampled.token_ids, mask, sampled.logprobs, sampled.versions, status)


def _no_text(token_ids: Sequence[np.ndarray]) -> list[str]:
    return [""] * len(token_ids)


def _streams(sources: Mapping[str, float]) -> TaskStreams:
    tasks = TaskList(lambda i: Task(id=str(i), prompt=""), TASKS, ordered=True)
    return TaskStreams(
        [Source(name, weight, TaskStream(tasks, 0, lambda _: 0, 0, "drop")) for name, weight in sources.items()]
    )
