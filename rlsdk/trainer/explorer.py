"""The half of a run that makes rollouts: streams, production, engines, rewards, environments, evaluation.

What passes between it and the half that trains are plain values: in one program they are handed over, between two they
travel (`trainer.far`).
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
from rlsdk.errors import ConfigError
from rlsdk.rollout.chat import Setting
from rlsdk.rollout.client import EngineClient
from rlsdk.rollout.gate import Gate
from rlsdk.rollout.lifecycle import Counts, Lifecycle, State, Ticket
from rlsdk.rollout.producer import Producer
from rlsdk.rollout.production import Policy, Production, UnfinishedError
from rlsdk.rollout.stream import TaskStreams
from rlsdk.rollout.worlds.fleet import Fleet
from rlsdk.trainer.canary import Canary
from rlsdk.trainer.cluster import Layout, exchanged_adapter, no_room, start_engine
from rlsdk.trainer.course import pace_of
from rlsdk.trainer.credit import apply_filters
from rlsdk.trainer.engines import Engines, Revival, Sender
from rlsdk.trainer.evaluation import Evaluation, evaluate, figures
from rlsdk.trainer.figures import raw_metrics
from rlsdk.types import Group, Task

MOST_REASONS = 20


@attrs.define(kw_only=True)
class Instruments:
    """Everything that an explorer works with, ready to run."""

    plan: Plan
    engines: Sequence[Any]
    layout: Layout
    client: EngineClient | None
    setting: Setting
    producer: Producer
    demonstrator: Producer | None
    evaluator: Producer
    streams: TaskStreams
    eval_tasks: Sequence[Task]
    filters: Sequence[Any]
    policy: Policy
    canary: Canary
    eval_worlds: Fleet | None = None


@attrs.frozen(kw_only=True, eq=False)
class Batch:
    """What a step is to be trained on.

    Attributes:
        tickets: With their groups.
        greedy: Number of a ticket -> reward of the greedy answer to its task, where it is wanted and could be scored.
        experts: What experts wrote on the same tasks, if it is wanted.
        figures: Metrics of what made it.
    """

    tickets: tuple[Ticket, ...]
    greedy: Mapping[int, float] = attrs.field(factory=dict)
    experts: tuple[Group, ...] = ()
    figures: Mapping[str, float] = attrs.field(factory=dict)

    @property
    def groups(self) -> list[Group]:
        """Those of the tickets."""
        return [ticket.group for ticket in self.tickets if ticket.group is not None]


@attrs.frozen
class Meter:
    """What has been counted so far; nothing of it ever falls.

    Attributes:
        clock: As `Engines.clock` gives it.
        wasted: Tokens that were sampled and never trained on.
    """

    clock: Mapping[str, float]
    wasted: int


@attrs.frozen
class Crew:
    """Engines: how many there are to be, the ranks of those that get requests, how many died, what was refused."""

    wanted: int
    alive: tuple[int, ...]
    lost: int
    refused: str


@attrs.frozen
class Snapshot:
    """Of one moment, for a checkpoint.

    Attributes:
        state: Plain JSON.
        waiting: Tickets whose groups wait for the trainer.
    """

    state: Mapping[str, Any]
    waiting: tuple[Ticket, ...]


@attrs.frozen
class Account:
    """What an explorer has to say at its end.

    Attributes:
        sources: Where each source of tasks stands.
        environments: What became of the workers that host environments, and what that made necessary.
        engines: How many died, and why.
        explorers_lost: Why explorers in programs of their own ended before the run did.
    """

    sources: Mapping[str, Counts]
    environments: Mapping[str, Any]
    engines: Mapping[str, Any]
    explorers_lost: tuple[str, ...] = ()


class Explorer:
    """Makes the batches of a run, by weights that it is sent.

    Attributes:
        engines: All of them.
        production: What starts tasks and keeps their groups.
    """

    def __init__(self, instruments: Instruments) -> None:
        """Make one; nothing runs before the first `take`."""
        self.i = instruments
        config = instruments.plan.config
        # On a GPU that both share, engines sleep while the learner works; on the CPU an idle engine takes nothing.
        shared = instruments.layout.device == "cuda" and config.placement.colocate
        if shared and config.production.runs_ahead:
            fault = (
                "production: rollouts cannot run ahead of a learner on their own device; set placement.colocate=false"
            )
            raise ConfigError([fault])
        self.engines = Engines(instruments.engines, shared=shared, revival=_revival(instruments))
        self._gate = instruments.setting.client if isinstance(instruments.setting.client, Gate) else None
        self._book = Lifecycle(instruments.streams.names)
        self._pace = pace_of(config.production)
        self.production = Production(
            self._book,
            self._pace,
            streams=instruments.streams,
            batch=fresh_groups(config),
            make=self._make,
            wanted=self._wanted,
            policy=instruments.policy,
            stop=instruments.plan.plugins.resolve(instruments.plan.stop),
            valve=self._gate,
        )
        self._baselines: dict[int, float] = {}
        self._made: list[Group] = []
        self._done = 0

    @property
    def eval_tasks(self) -> int:
        """Held-out tasks."""
        return len(self.i.eval_tasks)

    @property
    def canary_ids(self) -> np.ndarray:
        """int64 `[k]`: the fixed tokens that are compared after every sync."""
        return self.i.canary.token_ids

    @property
    def failure(self) -> BaseException | None:
        """What a task raised first."""
        return self.production.failure

    def _wanted(self, group: Group) -> bool:
        """Whether a group is for the trainer: any is, unless others are to take the place of what filters drop."""
        if not self.i.plan.config.production.dynamic_sampling:
            return True
        self._made.append(group)
        return bool(apply_filters([group], self.i.filters))

    async def tasks(self, places: Mapping[int, tuple[str, int]]) -> dict[int, Task]:
        """Tasks that were drawn before, without those of sources that are gone.

        Args:
            places: Number of a ticket -> source and position of its task.
        """
        streams = self.i.streams
        return {n: streams.at(source, position) for n, (source, position) in places.items() if source in streams.names}

    async def restore(self, step: int, state: Mapping[str, Any], groups: Mapping[int, Group]) -> tuple[int, int]:
        """Go on from `snapshot().state`.

        Args:
            step: Steps that are done.
            state: The state.
            groups: Number of a ticket -> its group, of those that are there; tasks of others are made again.

        Returns:
            How many groups are there, and how many tasks are made again.
        """
        self._done = step
        self.i.streams.restore(state["tasks"])
        again = self.production.restore(state["production"], lambda tasks: _holding(groups, tasks))
        self._baselines = {int(number): value for number, value in state.get("baselines", {}).items()}
        return len(self.production.available()), again

    async def take(self, step: int) -> Batch:
        """The batch of a step, as soon as it is there; see `Production.take`.

        Args:
            step: Steps that are done.
        """
        self._done, self.engines.step = step, step + 1
        if not self._pace.ahead:
            await self.engines.reseed(self.i.plan.config.seed, step + 1)
        tickets = await self.production.take(step)
        greedy = {t.number: self._baselines.pop(t.number) for t in tickets if t.number in self._baselines}
        made, self._made = self._made, []
        figures = {"tasks/dropped": float(self.i.streams.dropped), **self.engines.figures(), **raw_metrics(made)}
        experts = await self._experts([ticket.task for ticket in tickets])
        return Batch(tickets=tuple(tickets), greedy=greedy, experts=tuple(experts), figures=figures)

    def settle(self, batch: Batch, states: Sequence[State]) -> None:
        """Say what became of a batch that was taken; its step is done."""
        self.production.settle(batch.tickets, states)
        self._done += 1

    async def sync(self, learner: Sender, version: int, *, updated: bool) -> float:
        """Give the engines new weights, and compare; returns the canary's gap in nats.

        Args:
            learner: Whose weights.
            version: Steps that are done.
            updated: Whether the weights must have changed since the last time.

        Raises:
            CanaryError: Engine and learner disagree.
            EngineError: An engine failed.
        """
        gate = None if self.i.plan.config.production.in_flight else self._gate
        async with nullcontext() if gate is None else gate.held():
            return await self.engines.publish(learner, version, self.i.canary, updated=updated)

    async def sleep(self) -> None:
        """Free the device for the learner, if both share it."""
        if self.engines.shared:
            await self.engines.sleep()

    async def evaluate(self) -> Evaluation:
        """Evaluate the weights as they are."""
        section, setting = self.i.plan.config.eval, self.i.setting
        if self.i.eval_worlds is not None:
            setting = attrs.evolve(setting, worlds=self.i.eval_worlds)
        reseed = partial(self.engines.reseed, self.i.plan.config.seed, 0)
        answers = await evaluate(self.i.evaluator, self.i.eval_tasks, setting, section, reseed=reseed)
        return figures(answers, section.samples)

    async def snapshot(self) -> Snapshot:
        """For a checkpoint; nothing moves while it is taken."""
        return Snapshot(self.state(), tuple(self.production.available()))

    def state(self) -> dict[str, Any]:
        """Where it stands, as plain JSON."""
        return {
            "tasks": self.i.streams.state(),
            "production": self.production.state(),
            "baselines": {str(number): value for number, value in self._baselines.items()},
        }

    async def meter(self) -> Meter:
        """Seconds and tokens so far."""
        unheard = 0 if self.i.client is None else self.i.client.unheard
        clock = await self.engines.clock()
        return Meter(clock, self._book.wasted + unheard + (0 if self._gate is None else self._gate.dropped))

    async def attend(self, wish: int | None) -> Crew:
        """Have as many engines as somebody asks for, as far as there is room, and not wait for it."""
        refused = "" if wish is None else self.engines.resize(wish)
        return Crew(len(self.engines), self.engines.alive, len(self.engines.lost), refused)

    def sources(self) -> dict[str, Counts]:
        """Where each source of tasks stands."""
        return {name: self._book.counts(name) for name in self.i.streams.names}

    async def end(self) -> Account:
        """End what runs; to be called once, however the run ends."""
        try:
            await self.production.pause(self.i.plan.config.production.pause_timeout)
        finally:
            self.engines.close()
        return Account(self.sources(), self._environments(), self.engines.report())

    def _environments(self) -> dict[str, Any]:
        fleets = {id(f): f for f in (self.i.setting.worlds, self.i.eval_worlds) if isinstance(f, Fleet)}
        lost = [event for fleet in fleets.values() for event in fleet.lost]
        again = self.i.producer.run_again + self.i.evaluator.run_again
        return {"workers_lost": len(lost), "reasons": lost[:MOST_REASONS], "rollouts_run_again": again}

    async def _make(self, ticket: Ticket) -> Group:
        """The scored group of a task and, where it is wanted, the reward of the greedy answer."""
        i, size, key = self.i, self.i.plan.config.group_size, f"task {ticket.number}.{ticket.attempts}"
        async with asyncio.TaskGroup() as running:
            own = running.create_task(i.producer.group(ticket.task, i.setting, size, key, self._done + 1, ticket.group))
            greedy = None
            if "baseline_rewards" in i.plan.needs:
                plain = attrs.evolve(i.setting, sampling=attrs.evolve(i.setting.sampling, temperature=0.0))
                greedy = running.create_task(i.evaluator.group(ticket.task, plain, 1, f"{key} greedy"))
        if greedy is not None and greedy.result().rollouts[0].status == "aborted":
            raise UnfinishedError(own.result())
        if greedy is not None and greedy.result().scores[0].valid:
            self._baselines[ticket.number] = greedy.result().scores[0].value
        return own.result()

    async def _experts(self, tasks: Sequence[Task]) -> list[Group]:
        """What experts wrote, if it is wanted."""
        if self.i.demonstrator is None:
            return []
        return await self.i.demonstrator.produce(tasks, self.i.setting, 1, f"step {self._done + 1} expert")


def _holding(groups: Mapping[int, Group], tasks: Mapping[int, Task]) -> dict[int, Group]:
    """Groups by number, of these tasks: what a batch holds is told apart by its task, the object itself."""

    def holding(group: Group, task: Task) -> Group:
        if group.task is task:
            return group
        return attrs.evolve(group, task=task, rollouts=[attrs.evolve(r, task=task) for r in group.rollouts])

    return {number: holding(groups[number], task) for number, task in tasks.items() if number in groups}


def _revival(instruments: Instruments) -> Revival | None:
    """How engines that die come back, where there are any."""
    if instruments.client is None:
        return None
    plan, layout = instruments.plan, instruments.layout
    start = partial(start_engine, plan, layout, exchanged_adapter(plan))
    most, missing = plan.config.placement.engine_restarts, partial(no_room, plan, layout)
    return Revival(client=instruments.client, start=start, most=most, missing=missing)
