"""The step loop: take, assign credit, update, publish, check, log, save. It knows no algorithm, nor who samples."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs
import numpy as np

from rlsdk.config import Plan
from rlsdk.config.rules import fresh_groups
from rlsdk.contracts import TrainBatch
from rlsdk.learners.group import LearnerGroup
from rlsdk.rollout.experience import Experience, Used
from rlsdk.rollout.lifecycle import Counts, State
from rlsdk.rollout.production import Policy
from rlsdk.runlog.store import RolloutStore
from rlsdk.runlog.tables import Entry
from rlsdk.scoring.scorer import check_budget
from rlsdk.trainer.checkpoint import Checkpoints
from rlsdk.trainer.course import Clock, Course, pace_of
from rlsdk.trainer.credit import CreditAssigner, apply_filters
from rlsdk.trainer.explorer import Batch, Explorer, Meter
from rlsdk.trainer.far import FarExplorer
from rlsdk.trainer.figures import (
    reward_metrics,
    rollout_metrics,
    source_metrics,
    staleness_metrics,
    time_metrics,
)
from rlsdk.trainer.keeping import ends_of, entries_of, used_entry, used_of, waiting_entry
from rlsdk.trainer.pack import Packed, labels, minibatches, pack
from rlsdk.types import Group

log = logging.getLogger(__name__)
REASON = 240
"""Characters of why a rollout could not be scored, as the summary counts them."""


@attrs.define(kw_only=True)
class Parts:
    """Everything that a loop works with, ready to run."""

    plan: Plan
    learner: LearnerGroup
    explorer: Explorer | FarExplorer
    filters: Sequence[Any]
    policy: Policy
    credit: CreditAssigner
    checkpoints: Checkpoints


class Loop:
    """One run's steps. `done` steps are behind it; the weights that engines hold have that version.

    `scored` rollouts were scored since it was made, of which those `unscored` could not be, by reason; `reused` ones
    were trained again.
    """

    def __init__(self, parts: Parts, steps: int) -> None:
        self.p, self.explorer = parts, parts.explorer
        self.steps = steps
        self.interrupted = False
        config, section = parts.plan.config, parts.plan.config.production
        pace = pace_of(section)
        self.ahead = pace.ahead
        again, most = config.batch_size - fresh_groups(config), section.replay.most_uses
        self.experience = Experience(parts.policy, count=again, most_uses=most, young=pace.young)
        self.course = Course(production=parts.explorer, steps=steps, sync_interval=section.sync_interval)
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

    async def restore(self, step: int, store: RolloutStore | None = None) -> None:
        """Go on from the checkpoint of `step`, with the groups that the store kept for it."""
        state = self.p.checkpoints.read(step)
        replay, kept = state.get("replay", ()), state["production"].get("kept", ())
        await asyncio.to_thread(self.p.learner.load, self.p.checkpoints.path(step) / "learner")
        self.p.credit.restore(state["components"])
        groups: Mapping[int, Group] = {}
        if store is not None:
            waiting = {n: ("completed", None, 0) for *_, n in kept}
            used = {u["number"]: ("trained", u["step"], u["uses"]) for u in replay}
            places = {n: (source, position) for source, position, n in kept} | self.experience.places(replay)
            tasks = await self.explorer.tasks(places)
            await asyncio.to_thread(_rewind, store, step, {**waiting, **used})
            groups = await asyncio.to_thread(store.recall, tasks, step)
        back, again = await self.explorer.restore(step, state, {n: groups[n] for *_, n in kept if n in groups})
        self.experience.restore(replay, groups)
        log.info("%d groups that waited at the checkpoint are back, %d tasks on their way are made again", back, again)
        self.course.done = step

    async def publish(self, *, updated: bool) -> float:
        """Send the learner's weights to the engines and compare; returns the canary's gap in nats."""
        return await self.explorer.sync(self.p.learner, self.done, updated=updated)

    async def step(self) -> tuple[dict[str, float], list[Entry]]:
        """One training step; returns its metrics and its groups, with what became of them."""
        inside, before = await self._inside()
        clock, start = Clock(), time.perf_counter()
        metrics: dict[str, float] = {}
        entries: list[Entry] = []
        generated = 0.0

        async def learn(batch: Batch) -> list[State]:
            nonlocal generated
            used = self.experience.draw(self.done)
            packed = self._credit(batch, used, clock, metrics)
            if packed is not None:
                began = await self._generating()
                with clock("learn"):
                    metrics.update(await self._learn(packed, clock))
                generated = await self._generating() - began
            self._updated = self._updated or metrics.get("actor/grad_norm", 0.0) > 0
            ends = ends_of(batch.tickets, packed)
            self.experience.add(used_of(batch.tickets, ends, self.done + 1, batch.greedy))
            entries.extend([*entries_of(batch.tickets, ends, self.done + 1), *map(used_entry, used)])
            return ends

        async def publish() -> None:  # also where nothing was trained: the version counts steps
            metrics["canary/gap"] = await self.publish(updated=self._updated)
            self._updated = False

        await self.course.step(clock, learn, publish)
        wall = time.perf_counter() - start
        now, after = await self._inside()
        spent = {name: now[name] - inside[name] for name in inside}
        metrics |= self._times(clock, wall, spent, generated, metrics["rollouts/tokens"])
        if self.p.plan.sampled:
            metrics["rollouts/tokens_wasted"] = float(after.wasted - before.wasted)
        return metrics, entries

    async def _generating(self) -> float:
        """Seconds inside the engines so far, where they generate while the learner works."""
        return (await self.explorer.meter()).clock["engines"] if self.ahead else 0.0

    def sources(self) -> Mapping[str, Counts]:
        """Where each source of tasks stands; nothing where none is sampled for."""
        return self.explorer.sources() if self.p.plan.sampled else {}

    def _credit(self, batch: Batch, used: Sequence[Used], clock: Clock, metrics: dict[str, float]) -> Packed | None:
        """What of a batch is trained on; adds what its groups say about themselves to the metrics."""
        groups = batch.groups
        rollouts = [r for g in groups for r in g.rollouts]
        scores = [s for g in groups for s in g.scores]
        self.scored += len(scores)
        self.unscored.update(s.reason[:REASON] for s in scores if not s.valid)
        invalid = check_budget(rollouts, scores, self.p.plan.config.max_invalid, self.done + 1)
        baselines = {id(t.task): batch.greedy[t.number] for t in batch.tickets if t.number in batch.greedy}
        baselines |= {id(u.group.task): u.baseline for u in used if u.baseline is not None}
        with clock("credit"):
            kept = apply_filters(groups, self.p.filters)
            again = apply_filters([u.group for u in used], self.p.filters)
            wanted = "baseline_rewards" in self.p.plan.needs
            packed = pack([*kept, *again], batch.experts, baselines if wanted else None)
        self.reused += sum(map(len, again))
        metrics |= {
            **rollout_metrics(groups),
            **reward_metrics(groups, scored=self.p.plan.sampled),
            **source_metrics(groups, scored=self.p.plan.sampled),
            "rollouts/invalid": float(invalid),
            "groups/trained": len(kept) / len(groups),
            "rollouts/reused": float(sum(map(len, again))),
            **batch.figures,
        }
        return packed

    async def snapshot(self) -> tuple[dict[str, Any], list[Entry]]:
        """Of one moment: where the run stands, as plain JSON, and what a checkpoint of now wants back.

        That is: groups that wait, and those that may be trained again.
        """
        found = await self.explorer.snapshot()
        state = {
            **found.state,
            "replay": self.experience.state(),
            "components": self.p.credit.state(),
            "plugins": self.p.plan.code,
        }
        waiting = [waiting_entry(ticket, self.done) for ticket in found.waiting]
        return state, [*waiting, *(used_entry(used, self.done) for used in self.experience.held)]

    async def _learn(self, packed: Packed, clock: Clock) -> dict[str, float]:
        learner, config, plan = self.p.learner, self.p.plan.config, self.p.plan
        await self.explorer.sleep()
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
        plan, learner, batch = self.p.plan, self.p.learner, packed.batch
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

    def save(self, state: dict[str, Any], *, last: bool) -> Path:
        """Write a checkpoint of the steps done."""
        learner, wanted = self.p.learner, self.p.plan.config.checkpoint.export

        def write(folder: Path) -> None:
            learner.save(folder / "learner")
            if wanted == "every" or (wanted == "last" and last):
                learner.export(folder / "export")

        return self.p.checkpoints.save(self.done, state, write)

    async def _inside(self) -> tuple[dict[str, float], Meter]:
        """Seconds and tokens counted inside the actors so far; of several, the slowest."""
        learner, meter = await asyncio.gather(asyncio.to_thread(self.p.learner.clock), self.explorer.meter())
        return {**meter.clock, "learner": sum(v for k, v in learner.items() if k.endswith("_seconds"))}, meter

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


def _rewind(store: RolloutStore, step: int, kept: Mapping[int, tuple[str, int | None, int]]) -> None:
    with store.transaction():
        store.rewind(step, kept)


def _as_sampled(batch: TrainBatch, sampled: int) -> TrainBatch:
    """Take what experts wrote, behind the first `sampled` tokens, for sampled by the policy before the update."""
    behaviour = np.concatenate([batch.tokens["behaviour_logprobs"][:sampled], batch.tokens["old_logprobs"][sampled:]])
    return batch.with_tokens(behaviour_logprobs=behaviour)
