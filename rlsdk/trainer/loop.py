"""The step loop: produce, assign credit, update, publish, check, log, save. It knows no algorithm."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import attrs
import numpy as np

from rlsdk.config import Plan
from rlsdk.config.rules import fresh_groups
from rlsdk.contracts import TrainBatch
from rlsdk.errors import ConfigError
from rlsdk.rollout.chat import Setting
from rlsdk.rollout.client import EngineClient
from rlsdk.rollout.experience import Experience, Used
from rlsdk.rollout.gate import Gate
from rlsdk.rollout.lifecycle import Counts, Lifecycle, State, Ticket
from rlsdk.rollout.producer import Producer
from rlsdk.rollout.production import Policy, Production, Recall, UnfinishedError
from rlsdk.rollout.stream import TaskStreams
from rlsdk.rollout.worlds.fleet import Fleet
from rlsdk.runlog.store import RolloutStore
from rlsdk.runlog.tables import Entry
from rlsdk.scoring.scorer import check_budget
from rlsdk.trainer.canary import Canary
from rlsdk.trainer.checkpoint import Checkpoints
from rlsdk.trainer.cluster import Actors, exchanged_adapter, no_room, start_engine
from rlsdk.trainer.course import Clock, Course, pace_of
from rlsdk.trainer.credit import CreditAssigner, apply_filters
from rlsdk.trainer.engines import Engines, Revival
from rlsdk.trainer.evaluation import Evaluation, evaluate, figures
from rlsdk.trainer.figures import (
    reward_metrics,
    rollout_metrics,
    source_metrics,
    staleness_metrics,
    time_metrics,
)
from rlsdk.trainer.keeping import ends_of, entries_of, used_entry, used_of, waiting_entry
from rlsdk.trainer.pack import Packed, labels, minibatches, pack
from rlsdk.types import Group, Task

log = logging.getLogger(__name__)
MOST_REASONS = 20
REASON = 240
"""Characters of why a rollout could not be scored, as the summary counts them."""


@attrs.define(kw_only=True)
class Parts:
    """Everything that a loop works with, ready to run."""

    plan: Plan
    actors: Actors
    client: EngineClient | None
    setting: Setting
    producer: Producer
    demonstrator: Producer | None
    evaluator: Producer
    streams: TaskStreams
    eval_tasks: Sequence[Task]
    filters: Sequence[Any]
    policy: Policy
    credit: CreditAssigner
    canary: Canary
    checkpoints: Checkpoints
    eval_worlds: Fleet | None = None


class Loop:
    """One run's steps. `done` steps are behind it; the weights that engines hold have that version.

    `scored` rollouts were scored since it was made, of which those `unscored` could not be, by reason; `reused` ones
    were trained again.
    """

    def __init__(self, parts: Parts, steps: int) -> None:
        self.p = parts
        self.steps = steps
        self.interrupted = False
        placement = parts.plan.config.placement
        # On a GPU that both share, engines sleep while the learner works; on the CPU an idle engine takes nothing.
        shared = parts.actors.layout.device == "cuda" and placement.colocate
        self.engines = Engines(parts.actors.engines, shared=shared, revival=_revival(parts))
        section = parts.plan.config.production
        if shared and section.runs_ahead:
            fault = (
                "production: rollouts cannot run ahead of a learner on their own device; set placement.colocate=false"
            )
            raise ConfigError([fault])
        pace = pace_of(section)
        self.ahead = pace.ahead
        self._gate = parts.setting.client if isinstance(parts.setting.client, Gate) else None
        self._book = Lifecycle(parts.streams.names)
        fresh = fresh_groups(parts.plan.config)
        self.production = Production(
            self._book,
            pace,
            streams=parts.streams,
            batch=fresh,
            make=self._make,
            wanted=self._wanted,
            policy=parts.policy,
            stop=parts.plan.plugins.resolve(parts.plan.stop),
            valve=self._gate,
        )
        again, most = parts.plan.config.batch_size - fresh, section.replay.most_uses
        self.experience = Experience(parts.policy, count=again, most_uses=most, young=self.production.young)
        self.course = Course(production=self.production, steps=steps, sync_interval=section.sync_interval)
        self._baselines: dict[int, float] = {}
        self._updated = False
        self.tokens = 0
        self.generating = 0.0
        self.reused = 0
        self.scored = 0
        self.unscored: Counter[str] = Counter()
        self.phases: dict[str, float] = {}

    @property
    def done(self) -> int:
        """Steps that are behind it."""
        return self.course.done

    @property
    def ledger(self) -> dict[str, int]:
        """What became of the tasks that were issued; the others add up to `issued`."""
        counts = [self._book.counts(name) for name in self.p.streams.names]
        ends = {name: sum(getattr(c, name) for c in counts) for name in ("trained", "filtered", "failed")}
        left = sum(c.available + c.scheduled + c.waiting for c in counts)
        return {"issued": sum(ends.values()) + left, **ends, "returned": left}

    def _wanted(self, group: Group) -> bool:
        """Whether a group is for the trainer: any is, unless others are to take the place of what filters drop."""
        return not self.p.plan.config.production.dynamic_sampling or bool(apply_filters([group], self.p.filters))

    def restore(self, step: int, store: RolloutStore | None = None) -> None:
        """Go on from the checkpoint of `step`, with the groups that the store kept for it."""
        state = self.p.checkpoints.read(step)
        self.p.actors.learner.load(self.p.checkpoints.path(step) / "learner")
        self.p.streams.restore(state["tasks"])
        self.p.credit.restore(state["components"])
        recall: Recall = lambda tasks: {}  # noqa: E731
        if store is not None:
            waiting = {n: ("completed", None, 0) for *_, n in state["production"].get("kept", ())}
            used = {u["number"]: ("trained", u["step"], u["uses"]) for u in state.get("replay", ())}
            with store.transaction():
                store.rewind(step, {**waiting, **used})
            recall = partial(store.recall, step=step)
        again = self.production.restore(state["production"], recall)
        self.experience.restore(state.get("replay", ()), self.p.streams, recall)
        self._baselines = {int(number): value for number, value in state.get("baselines", {}).items()}
        back = len(self.production.available())
        log.info("%d groups that waited at the checkpoint are back, %d tasks on their way are made again", back, again)
        self.course.done = step

    async def publish(self, *, updated: bool) -> float:
        """Send the learner's weights to the engines and compare; returns the canary's gap in nats."""
        gate = None if self.p.plan.config.production.in_flight else self._gate
        async with nullcontext() if gate is None else gate.held():
            return await self.engines.publish(self.p.actors.learner, self.done, self.p.canary, updated=updated)

    async def evaluate(self) -> Evaluation:
        """Evaluate the weights as they are."""
        section = self.p.plan.config.eval
        setting = self.p.setting
        if self.p.eval_worlds is not None:
            setting = attrs.evolve(setting, worlds=self.p.eval_worlds)
        reseed = partial(self.engines.reseed, self.p.plan.config.seed, 0)
        answers = await evaluate(self.p.evaluator, self.p.eval_tasks, setting, section, reseed=reseed)
        return figures(answers, section.samples)

    async def step(self) -> tuple[dict[str, float], list[Entry]]:
        """One training step; returns its metrics and its groups, with what became of them."""
        clock, start = Clock(), time.perf_counter()
        self.engines.step = self.done + 1
        inside = await self._inside()
        metrics: dict[str, float] = {}
        entries: list[Entry] = []
        generated = 0.0

        async def learn(tickets: list[Ticket]) -> list[State]:
            nonlocal generated
            groups = [ticket.group for ticket in tickets if ticket.group is not None]
            used = self.experience.draw(self.done)
            greedy = {t.number: self._baselines.pop(t.number) for t in tickets if t.number in self._baselines}
            baselines = {id(t.task): greedy[t.number] for t in tickets if t.number in greedy}
            baselines |= {id(u.group.task): u.baseline for u in used if u.baseline is not None}
            packed = await self._credit(groups, used, baselines, clock, metrics)
            if packed is not None:
                before = await self._generating()
                with clock("learn"):
                    metrics.update(await self._learn(packed, clock))
                generated = await self._generating() - before
            self._updated = self._updated or metrics.get("actor/grad_norm", 0.0) > 0
            ends = ends_of(tickets, packed)
            self.experience.add(used_of(tickets, ends, self.done + 1, greedy))
            entries.extend([*entries_of(tickets, ends, self.done + 1), *map(used_entry, used)])
            return ends

        async def publish() -> None:  # also where nothing was trained: the version counts steps
            metrics["canary/gap"] = await self.publish(updated=self._updated)
            self._updated = False

        if not self.ahead:
            with clock("produce"):
                await self.engines.reseed(self.p.plan.config.seed, self.done + 1)
        wasted = self._wasted
        await self.course.step(clock, learn, publish)
        wall, after = time.perf_counter() - start, await self._inside()
        spent = {name: after[name] - inside[name] for name in inside}
        metrics |= self._times(clock, wall, spent, generated, metrics["rollouts/tokens"])
        if self.p.plan.sampled:
            metrics["rollouts/tokens_wasted"] = float(self._wasted - wasted)
        return metrics, entries

    @property
    def _wasted(self) -> int:
        """Tokens that were sampled and never trained on, since the loop was made."""
        unheard = 0 if self.p.client is None else self.p.client.unheard
        return self._book.wasted + unheard + (0 if self._gate is None else self._gate.dropped)

    async def _generating(self) -> float:
        """Seconds inside the engines so far, where they generate while the learner works."""
        return (await self.engines.clock())["engines"] if self.ahead else 0.0

    def sources(self) -> dict[str, Counts]:
        """Where each source of tasks stands; nothing where none is sampled for."""
        return {name: self._book.counts(name) for name in self.p.streams.names} if self.p.plan.sampled else {}

    async def _credit(
        self,
        groups: Sequence[Group],
        used: Sequence[Used],
        baselines: Mapping[int, float],
        clock: Clock,
        metrics: dict[str, float],
    ) -> Packed | None:
        """What of a batch is trained on; adds what its groups say about themselves to the metrics."""
        with clock("produce"):
            experts = await self._experts([group.task for group in groups])
        rollouts = [r for g in groups for r in g.rollouts]
        scores = [s for g in groups for s in g.scores]
        self.scored += len(scores)
        self.unscored.update(s.reason[:REASON] for s in scores if not s.valid)
        invalid = check_budget(rollouts, scores, self.p.plan.config.max_invalid, self.done + 1)
        with clock("credit"):
            kept = apply_filters(groups, self.p.filters)
            again = apply_filters([u.group for u in used], self.p.filters)
            packed = pack([*kept, *again], experts, baselines if "baseline_rewards" in self.p.plan.needs else None)
        self.reused += sum(map(len, again))
        metrics |= {
            **rollout_metrics(groups),
            **reward_metrics(groups, scored=self.p.plan.sampled),
            **source_metrics(groups, scored=self.p.plan.sampled),
            "rollouts/invalid": float(invalid),
            "groups/trained": len(kept) / len(groups),
            "rollouts/reused": float(sum(map(len, again))),
            "tasks/dropped": float(self.p.streams.dropped),
            **self.engines.figures(),
        }
        return packed

    def kept(self) -> list[Entry]:
        """What a checkpoint of now wants back: groups that wait, and those that may be trained again."""
        waiting = [waiting_entry(ticket, self.done) for ticket in self.production.available()]
        return [*waiting, *(used_entry(used, self.done) for used in self.experience.held)]

    async def _make(self, ticket: Ticket) -> Group:
        """The scored group of a task and, where it is wanted, the reward of the greedy answer."""
        p, size, key = self.p, self.p.plan.config.group_size, f"task {ticket.number}.{ticket.attempts}"
        async with asyncio.TaskGroup() as running:
            own = running.create_task(p.producer.group(ticket.task, p.setting, size, key, self.done + 1, ticket.group))
            greedy = None
            if "baseline_rewards" in p.plan.needs:
                plain = attrs.evolve(p.setting, sampling=attrs.evolve(p.setting.sampling, temperature=0.0))
                greedy = running.create_task(p.evaluator.group(ticket.task, plain, 1, f"{key} greedy"))
        if greedy is not None and greedy.result().rollouts[0].status == "aborted":
            raise UnfinishedError(own.result())
        if greedy is not None and greedy.result().scores[0].valid:
            self._baselines[ticket.number] = greedy.result().scores[0].value
        return own.result()

    async def _experts(self, tasks: Sequence[Task]) -> list[Group]:
        """What experts wrote, if it is wanted."""
        if self.p.demonstrator is None:
            return []
        return await self.p.demonstrator.produce(tasks, self.p.setting, 1, f"step {self.done + 1} expert")

    async def _learn(self, packed: Packed, clock: Clock) -> dict[str, float]:
        learner, config, plan = self.p.actors.learner, self.p.plan.config, self.p.plan
        if self.engines.shared:
            await self.engines.sleep()
        with clock("logprobs"):
            computed = await asyncio.to_thread(self._forward, packed)
        with clock("credit"):
            batch = self.p.credit.assign(packed, computed)
            extra = {k: v for k, v in computed.items() if k in ("values", "ref_logprobs")}
            batch = batch.with_tokens(old_logprobs=computed["logprobs"], **extra)
            batch = _as_sampled(batch, packed.sampled_tokens).with_rollouts(**labels(packed, plan.needs))
            pairs = "pairs" in plan.needs
            seed = [config.seed, self.done]
            parts = minibatches(packed, config.minibatches, config.passes, seed, whole_groups=pairs)
        with clock("update"):
            metrics = await asyncio.to_thread(learner.update, batch, parts, self.done)
        if plan.sampled:
            trained = batch.loss_mask[: packed.sampled_tokens]
            versions = batch.tokens["policy_versions"][: packed.sampled_tokens][trained]
            metrics |= staleness_metrics(versions, self.done, spread=bool(self.ahead))
        return metrics

    def _forward(self, packed: Packed) -> dict[str, np.ndarray]:
        """Fields that one pass without a gradient gives: old logprobs, values, the reference's logprobs."""
        plan, learner, batch = self.p.plan, self.p.actors.learner, packed.batch
        fields: list[str] = [f for f in ("entropy", "probs_squared_sum") if f in self.p.credit.needs]
        computed: dict[str, np.ndarray] = {"logprobs": batch.tokens["behaviour_logprobs"]}
        # Nobody sampled what experts wrote: only the learner can say how likely it was.
        mixed = packed.sampled < len(packed.rollouts)
        recompute = plan.sampled and (mixed or plan.config.old_logprobs == "learner")
        if recompute or fields:
            own = learner.logprobs(batch, "actor", (["logprobs"] if recompute else []) + fields)
            computed |= own
        if plan.needs_reference:
            computed["ref_logprobs"] = learner.logprobs(batch, "reference", ["logprobs"])["logprobs"]
        if plan.algorithm.critic:
            computed["values"] = learner.values(batch)
        return computed

    def environments(self) -> dict[str, Any]:
        """What became of the workers that host environments, and what that made necessary."""
        fleets = {id(f): f for f in (self.p.setting.worlds, self.p.eval_worlds) if isinstance(f, Fleet)}
        lost = [event for fleet in fleets.values() for event in fleet.lost]
        again = self.p.producer.run_again + self.p.evaluator.run_again
        return {"workers_lost": len(lost), "reasons": lost[:MOST_REASONS], "rollouts_run_again": again}

    def state(self) -> dict[str, Any]:
        """Where the run stands, as plain JSON; asked for on the event loop, where nothing else moves meanwhile."""
        return {
            "tasks": self.p.streams.state(),
            "production": self.production.state(),
            "replay": self.experience.state(),
            "baselines": {str(number): value for number, value in self._baselines.items()},
            "components": self.p.credit.state(),
            "plugins": self.p.plan.code,
        }

    def save(self, state: dict[str, Any], *, last: bool) -> Path:
        """Write a checkpoint of the steps done."""
        learner, wanted = self.p.actors.learner, self.p.plan.config.checkpoint.export

        def write(folder: Path) -> None:
            learner.save(folder / "learner")
            if wanted == "every" or (wanted == "last" and last):
                learner.export(folder / "export")

        return self.p.checkpoints.save(self.done, state, write)

    async def _inside(self) -> dict[str, float]:
        """Seconds and tokens counted inside the actors so far; of several, the slowest."""
        learner = await asyncio.to_thread(self.p.actors.learner.clock)
        return {**await self.engines.clock(), "learner": sum(v for k, v in learner.items() if k.endswith("_seconds"))}

    def _times(
        self, clock: Clock, wall: float, spent: Mapping[str, float], generated: float, sampled: float
    ) -> dict[str, float]:
        tokens = spent["tokens"] or sampled
        phases = {**clock.seconds, "produce": clock.seconds.get("produce", 0.0) + clock.seconds["take"]}
        self.tokens += int(tokens)
        metrics = time_metrics(phases, wall, spent, generated=generated, ahead=bool(self.ahead))
        for name, seconds in phases.items():
            if f"time/{name}" in metrics:
                self.phases[name] = self.phases.get(name, 0.0) + seconds
        generating = wall if self.ahead else phases["produce"]  # ahead, engines generate all the time
        self.generating += generating
        return {**metrics, "time/tokens_per_second": tokens / max(generating, 1e-9)}


def _revival(parts: Parts) -> Revival | None:
    """How engines that die come back, where there are any."""
    if parts.client is None:
        return None
    start = partial(start_engine, parts.plan, parts.actors.layout, exchanged_adapter(parts.plan))
    most, missing = parts.plan.config.placement.engine_restarts, partial(no_room, parts.plan, parts.actors.layout)
    return Revival(client=parts.client, start=start, most=most, missing=missing)


def _as_sampled(batch: TrainBatch, sampled: int) -> TrainBatch:
    """Take what experts wrote, behind the first `sampled` tokens, for sampled by the policy before the update."""
    behaviour = np.concatenate([batch.tokens["behaviour_logprobs"][:sampled], batch.tokens["old_logprobs"][sampled:]])
    return batch.with_tokens(behaviour_logprobs=behaviour)
