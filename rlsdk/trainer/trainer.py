"""The training loop. `Trainer` is the class behind every run; subclass it, or call its methods by hand."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AsyncExitStack, ExitStack
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import numpy as np
from rich.console import Console

from rlsdk.checkpoints.checkpoint import Checkpoints
from rlsdk.cluster.template import template
from rlsdk.config import Plan, Source, check
from rlsdk.config.rules import fresh_groups
from rlsdk.contracts.rollouts import NoRolloutsError, Rollouts, TakenBatch
from rlsdk.contracts.training import LearnerHandle, TrainedRole
from rlsdk.errors import RunError, ScoringError
from rlsdk.fields import FORWARD
from rlsdk.isolation.process import settle, sigterm_as_interrupt
from rlsdk.loops.signals import handled
from rlsdk.opening.record import RunRecord, open_run
from rlsdk.opening.resuming import check_resumed
from rlsdk.plurals import counted
from rlsdk.readiness.base_models import fingerprints
from rlsdk.readiness.data_files import data_fingerprints
from rlsdk.rollout.staleness import StalenessPolicy
from rlsdk.rollout.step_batch import StepBatch, apply_filters, labels, pack, produce
from rlsdk.scoring.outcome import check_budget
from rlsdk.trainer.assembly import examined, started, steps_of
from rlsdk.trainer.callbacks import Callback, LeavingNodes, Metrics, checked_callbacks, standard_callbacks
from rlsdk.trainer.credit import CreditAssigner, minibatches, train_critic
from rlsdk.trainer.interactive import in_event_loop, run_async, sampled_by_hand, token_ids, whole_updates
from rlsdk.trainer.ledger import ReplayBuffer, ReplayedGroup, entries_of, final_statuses, newly_trained, replayed_entry
from rlsdk.trainer.metrics import (
    TO_OLD,
    reward_metrics,
    rollout_metrics,
    skipped_updates,
    source_metrics,
    source_shares,
    step_line,
    update_metrics,
    with_reported,
)
from rlsdk.trainer.observing import Profiling
from rlsdk.trainer.state import restore, snapshot, write_checkpoint
from rlsdk.trainer.summary import LearningMonitor, RunCounters, log_background_failure, summarise, teaches
from rlsdk.trainer.timing import RunTimes, StepTimer, Timer
from rlsdk.types import Group

if TYPE_CHECKING:
    from rlsdk.contracts import Completion, Sampling
    from rlsdk.contracts.rollouts import Evaluation, TaskCounts
    from rlsdk.learners.apart import DividedLearnerGroup
    from rlsdk.runlog.store import RolloutStore
    from rlsdk.runlog.tables import Entry

log = logging.getLogger(__name__)
NOTICE = "interrupted: the run will finish and save this step, then end; interrupt again to end it at once"


class Trainer:
    """Train a policy.

    `step` runs one training step, with one line per stage and no callbacks. `train` runs the remaining steps with the
    callbacks around each; `evaluate` and `save` evaluate and save once. Every stage is a method, so a subclass can
    change one and keep the others.

    Attributes:
        plan: Checked configuration.
        rollouts: Source of rollouts.
        learner: All ranks of the learner.
        steps: Steps of the whole run.
        version: Number of completed steps; each publication tags the engines' weights with it.
        callbacks: Called in this order around each step; see `rlsdk.trainer.callbacks`.
        replay: Groups that were trained on and may be trained on again.
        credit: Chain of shapings and the advantage estimator.
        base_models: Fingerprints of the models that the run loads.
        data_files: Fingerprints of the local files of its tasks.
        timer: Seconds spent in each phase of the current step, or of the last one.
        closed: Rollout store entries of the last step's groups, each with its final status.
        interrupted: True once the run was asked to end after the current step.
        updating: True from a step's update until the step counts; it stays true if the learner has trained by then and
            an error or an interrupt ends the step.
        in_training: True while `train` runs the steps.
        closed_down: True once the trainer was closed.
        resources: Everything that `close` shuts down.
        record: Folder, log and report of the run; None if the trainer was created without a run.
        save_requested: True while a requested checkpoint is not written yet.
    """

    def __init__(
        self,
        plan: Plan,
        *,
        rollouts: Rollouts,
        learner: LearnerHandle,
        steps: int | None = None,
        checkpoints: Checkpoints | None = None,
        store: RolloutStore | None = None,
        resume_from: int | None = None,
        data_files: Mapping[str, str] | None = None,
        callbacks: Iterable[Callback] = (),
    ) -> None:
        """Create a trainer from running rollouts and a running learner; `from_config` starts both for you.

        Args:
            plan: Checked configuration.
            rollouts: Source of rollouts.
            learner: Started learner.
            steps: Number of steps of the run; default: the plan's.
            checkpoints: Checkpoint folder; default: the one in the plan's run folder.
            store: Rollout store on disk; None to keep no rollouts.
            resume_from: Step of the checkpoint to continue from; None for a new run.
            data_files: Fingerprints of the local files of the tasks, if already taken.
            callbacks: Called in this order around each step.
        """
        config, section, resolve = plan.config, plan.config.rollout, plan.plugins.resolve
        self.plan, self.rollouts, self.learner, self.callbacks = plan, rollouts, learner, list(callbacks)
        self.steps = steps_of(plan) if steps is None else steps
        self.version = 0
        self.checkpoints = checkpoints or Checkpoints(plan.folder, config.checkpoint.keep)
        self.filters = [resolve(reference) for reference in plan.filters]
        self.credit = CreditAssigner.of(plan)
        limits = StalenessPolicy.of(section)
        self.runs_ahead = bool(limits.ahead)
        self.replay = ReplayBuffer(
            resolve(plan.buffer),
            count=config.batch_size - fresh_groups(config),
            most_uses=section.replay.most_uses,
            young=limits.young,
        )
        self.monitor = LearningMonitor(config.max_empty_steps, plan.folder)
        self.counters, self.times = RunCounters(), RunTimes()
        self.timer: Timer = Timer()
        self.closed: Sequence[Entry] = ()
        self.samples: dict[str, Sequence[Mapping[str, Any]]] = {}
        self.interrupted = self.save_requested = False
        self._ended_early = False  # by an interrupt, which does not concern the next call of `train`
        self._store, self._resume_from = store, resume_from
        self.base_models = fingerprints(plan)
        self.data_files = data_fingerprints(plan) if data_files is None else data_files
        self._updated = self._synced = self._restored = False
        self.updating = self.in_training = self.closed_down = False
        self._last_saved = -1  # step of the checkpoint that ends the training
        self.resources = ExitStack()
        self.record: RunRecord | None = None

    @classmethod
    def from_config(
        cls,
        config: Source,
        *overrides: str,
        plugins: Sequence[str | Path] = (),
        resume: bool | int = False,
        overwrite: bool = False,
        allow_changes: bool = False,
        callbacks: Iterable[Callback] = (),
        console: Console | None = None,
    ) -> Self:
        """Start Ray, engines and learner for a configuration, and return a trainer ready for its first step.

        Close it with `close`, or use it as a context manager. Until then, SIGTERM interrupts a script as Ctrl-C does.

        Args:
            config: A YAML file, an `rlsdk.Config`, or a mapping; decorated objects may replace component names.
            *overrides: Settings as `key=value` strings.
            plugins: Plugin files.
            resume: Continue from the newest intact checkpoint or, given a number, from the checkpoint of that step.
            overwrite: Delete an earlier run in the same folder.
            allow_changes: Resume even if settings have changed that affect the training.
            callbacks: Your own callbacks; they run after evaluation and before logging and saving.
            console: Console for progress; default: standard error.

        Raises:
            ConfigError: The configuration is wrong; nothing was started.
            RlsdkError: A part of the run did not start.
            TypeError: A callback is not a `Callback`.
        """
        callbacks = checked_callbacks(callbacks)
        plan = (check if resume is False else check_resumed)(config, overrides, plugins)
        how: dict[str, Any] = {"resume": resume, "overwrite": overwrite, "allow_changes": allow_changes}
        with ExitStack() as stack:
            if not in_event_loop():  # in a notebook, SIGTERM ends the kernel
                stack.enter_context(sigterm_as_interrupt())
            python = stack.enter_context(template(plan))
            tasks, rehearsed = examined(plan)
            record = stack.enter_context(open_run(plan, console=console, rehearsed=rehearsed, **how))
            record.by_hand = True
            starting = started(plan, record.gpus, tasks, record.observers, python=python, by_hand=True)
            trainer = cls.of_run(record, *stack.enter_context(starting), callbacks)
            run_async(trainer.prepare())
            trainer.resources = stack.pop_all()
        _OPENED.append(trainer)
        return trainer

    @staticmethod
    def close_open() -> None:
        """Close the trainer that `from_config` started in this program, if it is still open.

        It works where no variable refers to the trainer any more, as in a notebook after `del trainer`.
        """
        for trainer in _OPENED:
            trainer.close()

    @classmethod
    def of_run(
        cls,
        record: RunRecord,
        rollouts: Rollouts,
        learner: DividedLearnerGroup,
        steps: int,
        callbacks: Iterable[Callback] = (),
    ) -> Self:
        """Create the trainer of an open run."""
        beside: list[Callback] = [LeavingNodes(learner)]
        if record.plan.config.profile.steps:
            beside.append(Profiling(learner))
        trainer = cls(
            record.plan,
            rollouts=rollouts,
            learner=learner,
            steps=steps,
            checkpoints=record.checkpoints,
            store=record.store,
            resume_from=record.resume_from,
            data_files=record.data_files,
            callbacks=standard_callbacks(record.console, record.observers, record.store, callbacks, beside),
        )
        trainer.record = record
        trainer.times.seconds["start"] = time.perf_counter() - record.opened
        log.info("ready after %.1f s", trainer.times.seconds["start"])
        return trainer

    @whole_updates
    async def step(self) -> dict[str, float]:
        """Run one training step without callbacks, and return its metrics; each line is a stage of docs/design.md.

        A step that failed or was interrupted before its update gets the same batch when it is called again. An
        interrupt during the update takes effect at the end of the step, which counts. If an exception ends a step in
        which the learner has trained, the trainer cannot be used any more: a second update on the batch would differ
        from the one that was meant.
        """
        await self.catch_up()
        timer = await StepTimer(self.plan, self.learner, self.rollouts, ahead=self.runs_ahead).start()
        self.timer = timer
        with timer("take"):
            taken = await self.rollouts.take(self.version)
        metrics = self.describe(taken)
        learned: dict[str, float] = {}
        reused = self.replay.draw(self.version)
        with timer("credit"):
            groups = self.filter([*taken.groups, *(used.group for used in reused)])
            batch = self.pack(groups, taken, reused)
        if batch is not None:
            async with timer.learning():
                await self.rollouts.sleep()
                with timer("logprobs"):
                    batch = await self.forward(batch)
                with timer("credit"):
                    batch = await self.assign_credit(batch)
                with timer("update"):
                    self.updating = True
                    learned = await self.update(batch, self.minibatches(batch))
        metrics |= self.close_ledger(taken, groups, reused, batch, {**metrics, **learned})
        self.version, self.updating = self.version + 1, False
        self._synced = self._synced and not self.sync_due
        metrics |= await self.move_reference(asleep=batch is not None)
        if self.sync_due:
            with timer("sync"):
                metrics["canary/gap"] = await self.publish()
        metrics |= await timer.stop(metrics, self.times)
        return with_reported(metrics, learned, self._update_giver)

    def filter(self, groups: Sequence[Group]) -> list[Group]:
        """Return the groups, or parts of groups, that the filters let through."""
        return apply_filters(groups, self.filters)

    def pack(
        self, groups: Sequence[Group], taken: TakenBatch, reused: Sequence[ReplayedGroup] = ()
    ) -> StepBatch | None:
        """Pack the rollouts of a step into arrays; None if there is nothing to train on.

        Args:
            groups: Groups that the filters let through.
            taken: Batch from the rollouts, which holds demonstrations and greedy answers.
            reused: Groups of earlier steps that are trained on again.
        """
        baselines = None
        if "baseline_rewards" in self.plan.needs:
            uids = {record.number: record.group.uid for record in taken.records if record.group is not None}
            baselines = {uids[number]: reward for number, reward in taken.greedy.items() if number in uids}
            baselines |= {used.group.uid: used.baseline for used in reused if used.baseline is not None}
        return pack(groups, taken.experts, baselines)

    async def forward(self, batch: StepBatch) -> StepBatch:
        """Add the fields that the learner and plugins compute: old logprobs, values, reference logprobs, …."""
        plan = self.plan
        read = self.credit.needs.union(*(field.needs for field in plan.fields))
        # Expert rollouts were not sampled, so only the learner can compute their logprobs.
        learner = batch.has_experts or plan.config.old_logprobs == "learner"
        recompute = learner if plan.sampled else "logprobs" in read
        wanted = {"logprobs": recompute, "ref_logprobs": plan.needs_reference, "values": plan.algorithm.critic}
        fields = [name for name in FORWARD if wanted.get(name, name in read)]
        computed = await asyncio.to_thread(self.learner.forward, batch.arrays, fields)
        engines = {"logprobs": batch.arrays.tokens["behaviour_logprobs"]} if plan.sampled else {}
        batch = batch.with_fields(**{**engines, **computed})
        return await produce(batch, plan.fields)

    async def assign_credit(self, batch: StepBatch) -> StepBatch:
        """Run the shapings and the advantage, and add the fields that the loss reads."""
        batch = await self.credit.assign_aside(batch, train_step=self.version, train_steps=self.steps)
        plan = self.plan
        right = labels(batch, plan.needs, passing=plan.algorithm.passing, rewarded=bool(plan.rewards))
        return batch.for_update(**right)

    def minibatches(self, batch: StepBatch) -> list[np.ndarray]:
        """Return the rollout indices (int64) of each optimiser step."""
        config, seed = self.plan.config, [self.plan.config.seed, self.version]
        return minibatches(batch, config.minibatches, config.passes, seed, whole_groups=self.plan.whole_groups)

    async def update(self, batch: StepBatch, minibatches: Sequence[np.ndarray]) -> dict[str, float]:
        """Take an optimiser step for each minibatch, and return the metrics."""
        if self.trained_role == "critic":
            metrics = await asyncio.to_thread(train_critic, self.learner, batch.arrays, minibatches, self.version)
        else:
            metrics = await self.optimise(batch, minibatches)
        moved = metrics.get("actor/grad_norm", 0.0) > 0 and metrics.get("actor/lr", 1.0) > 0
        self._updated = self._updated or moved
        if "old_logprobs" not in batch.arrays.tokens:  # demonstrations are compared with no earlier policy
            metrics = {name: value for name, value in metrics.items() if name not in TO_OLD}
        own = {f"schedule/{name}": each.at(self.version) for name, each in self.plan.schedules.items()}
        own |= self.credit.metrics()
        if self.plan.sampled:
            recomputed = self.plan.config.old_logprobs == "learner"
            own |= update_metrics(batch, self.version, recomputed=recomputed, ahead=self.runs_ahead)
        return with_reported(own, metrics, self._update_giver)

    @property
    def _update_giver(self) -> str:
        return f"{type(self).__name__}.update with {self.plan.learner.origin}"

    async def optimise(self, batch: StepBatch, minibatches: Sequence[np.ndarray]) -> dict[str, float]:
        """Run the optimiser steps of `update` on the learner, and return their metrics.

        A subclass may call the learner's `forward_backward` and `optimizer_step` itself.
        """
        return await asyncio.to_thread(self.learner.update, batch.arrays, minibatches, self.version)

    @property
    def trained_role(self) -> TrainedRole:
        """The critic in the first `critic.warmup_steps` steps, which train nothing else; the actor later."""
        return "critic" if self.version < self.plan.config.critic.warmup_steps else "actor"

    async def move_reference(self, *, asleep: bool) -> dict[str, float]:
        """Move the reference model towards the policy, every `reference.update_every` steps, and return its age.

        Args:
            asleep: True if engines that share the learner's devices are asleep.
        """
        every = self.plan.config.reference.update_every
        if not every:
            return {}
        age = self.version % every
        if not age:
            if not asleep:
                await self.rollouts.sleep()
            with self.timer("update"):
                await asyncio.to_thread(self.learner.move_reference)
        return {"reference/age": float(age)}

    def close_ledger(
        self,
        taken: TakenBatch,
        groups: Sequence[Group],
        reused: Sequence[ReplayedGroup],
        batch: StepBatch | None,
        metrics: Mapping[str, float],
    ) -> dict[str, float]:
        """Record each task of a step as trained, filtered or failed, by the `uid` of its group.

        Args:
            taken: Batch from the rollouts.
            groups: Groups that the filters let through.
            reused: Groups of earlier steps that were trained on again.
            batch: Rollouts that were trained on; None if there were none.
            metrics: Metrics of the update.

        Returns:
            Metrics of the trained rollouts.
        """
        again = {used.group.uid for used in reused}
        # Filters may pass groups that cannot be trained on: those without a sampled token or a baseline.
        uids = () if batch is None else batch.uids[: batch.sampled]
        trained = set(uids)
        groups = [group for group in groups if group.uid in trained]
        rollouts_reused = sum(uid in again for uid in uids)
        step, skipped = self.version + 1, skipped_updates(metrics)
        for role, count in skipped.items():
            what = counted(count, "update")
            log.warning("step %d: skipped %s of the %s: loss or gradient not finite", step, what, role)
        self.counters.note(taken.groups)
        self.counters.reused += rollouts_reused
        self.counters.skipped_updates.update(skipped)
        statuses = final_statuses(taken.records, batch)
        self.replay.add(newly_trained(taken.records, statuses, step, taken.greedy), reused)
        self.closed = [*entries_of(taken.records, statuses, step, batch), *map(replayed_entry, reused)]
        fresh = sum(group.uid not in again for group in groups)
        found = {"groups/trained": fresh / len(taken.groups), "rollouts/reused": float(rollouts_reused)}
        found |= source_shares(groups) if len(self.rollouts.sources()) > 1 else {}
        role = self.trained_role
        self.monitor.note({**metrics, **found}, taught=batch is not None and teaches(batch, metrics, role), role=role)
        self.rollouts.settle(taken, statuses)
        return found

    @property
    def sync_due(self) -> bool:
        """True if the weights are due for a sync: every `rollout.sync_interval` steps, and after the last step."""
        return self.version % self.plan.config.rollout.sync_interval == 0 or self.version == self.steps

    async def publish(self) -> float:
        """Send the learner's weights to the engines, compare both, and return the largest logprob gap in nats."""
        gap = await self.rollouts.publish(self.learner, self.version, updated=self._updated)
        self._updated, self._synced = False, True
        return gap

    def describe(self, taken: TakenBatch) -> dict[str, float]:
        """Return the metrics of a step's groups.

        Raises:
            ScoringError: The share of rollouts that could not be scored exceeds `max_invalid`.
        """
        groups, scored = taken.groups, self.plan.scored
        try:
            invalid = check_budget(groups, self.plan.config.max_invalid, self.version + 1)
        except ScoringError:
            self.closed = entries_of(taken.records, final_statuses(taken.records, None), self.version + 1, None)
            raise
        return {
            **rollout_metrics(groups),
            **reward_metrics(groups, scored=scored, separate=self.plan.separate_rewards),
            **source_metrics(groups, scored=scored, separate=self.plan.separate_rewards),
            "rollouts/invalid": float(invalid),
            **taken.metrics,
        }

    def check_usable(self) -> None:
        """Check that the trainer is open, and that its weights are those of a step.

        Raises:
            RunError: It is closed, or its last update was cut off by an exception or a second interrupt.
        """
        if self.closed_down:
            raise RunError(
                "this trainer is closed: its engines and its learner are stopped. Create another one with "
                "from_config(…, resume=True), which continues from the newest checkpoint"
            )
        if self.updating:
            raise RunError(
                f"step {self.version + 1} was cut off while it updated the weights, which may hold a part of the "
                "update; close this trainer, and continue from a checkpoint with from_config(…, resume=True)"
            )

    async def catch_up(self) -> None:
        """Publish the weights if the sync of the last step failed, since older ones cannot sample the next batch."""
        if self.version and not self._synced:
            await self.publish()

    @property
    def ended(self) -> bool:
        """True after the last step, or after `max_empty_steps` consecutive steps that taught nothing."""
        return self.version >= self.steps or self.monitor.stuck

    @property
    def ended_by_hand(self) -> bool:
        """True if calls of `step` have reached the end of the training, and the last checkpoint is not written yet."""
        return self.ended and self.version not in (self._resume_from or 0, self._last_saved)

    def train(self) -> dict[str, Any]:
        """Train the remaining steps, or until interrupted, and return the summary; the next call trains the rest.

        Also works where an event loop is already running, as in a notebook.
        """

        def interrupt() -> None:
            log.warning("%s", NOTICE)
            self.interrupt()

        if self._ended_early:
            self.interrupted = self._ended_early = False
        try:
            return run_async(self.train_async(), interrupt)
        finally:
            self._ended_early = self.interrupted

    async def train_async(self) -> dict[str, Any]:
        """Train as `train` does, in the running event loop."""
        record = self.record
        try:
            self.check_usable()
            if record is not None:
                record.begin()
            summary = await self._train_with_callbacks()
        except BaseException as error:
            if record is not None:
                cause = KeyboardInterrupt() if isinstance(error, asyncio.CancelledError) else error
                record.failure = record.failure or cause  # a second one only refuses to train
            raise
        if record is not None:
            record.finish(summary, self.samples)
        return summary

    async def _train_with_callbacks(self) -> dict[str, Any]:
        await self.restore()
        async with AsyncExitStack() as ends:
            for callback in self.callbacks:
                await callback.on_start(self)
                ends.push_async_exit(partial(_end, self, callback))
            with handled(NOTICE, self.interrupt, self.save_soon):
                self.in_training = True
                try:
                    await self._train_steps()
                finally:
                    self.in_training = False
                    rollouts = await self.rollouts.pause()
                    log_background_failure(self.rollouts.failure)
        summary = summarise(self, rollouts)
        for callback in self.callbacks:
            await callback.on_summary(self, summary)
        return summary

    async def prepare(self) -> None:
        """Restore the checkpoint, if any, and publish the first weights; `train` calls this if you have not."""
        await self.restore()
        if not self._synced:
            await self.publish()

    async def _train_steps(self) -> None:
        settle(rollouts=True)
        await self.prepare()
        log.debug("step %d of %d: engines and learner agree; training begins", self.version, self.steps)
        if self.ended:
            log.warning("step %d of %d is done: nothing is left to train", self.version, self.steps)
        found: Metrics = {}
        for callback in self.callbacks:
            await callback.before_training(self, found)
            found |= step_line(found, f"callback {type(callback).__name__}")
        while not (self.ended or self.interrupted):
            try:
                for callback in self.callbacks:
                    await callback.before_step(self)
                metrics = step_line(await self.step(), f"{type(self).__name__}.step")
            except NoRolloutsError as error:
                await self._end_without_rollouts(error)
                return
            for callback in self.callbacks:
                await callback.after_step(self, metrics)
                metrics |= step_line(metrics, f"callback {type(callback).__name__}")

    async def _end_without_rollouts(self, error: NoRolloutsError) -> None:
        """Save the steps that are done, and raise the error unless the run was asked to end."""
        log.warning("step %d is not taken: %s", self.version + 1, error)
        if self.version > (self._resume_from or 0):
            await self.save_async(last=True)
        if not self.interrupted:
            raise error

    def evaluate(self) -> Evaluation:
        """Evaluate the engines' current weights on the held-out tasks."""
        return run_async(self.evaluate_async())

    async def evaluate_async(self) -> Evaluation:
        """Evaluate as `evaluate` does, in the running event loop."""
        self.check_usable()
        await self.catch_up()
        with self.times("evaluation"):
            return await self.rollouts.evaluate()

    def sample(
        self,
        prompts: Sequence[np.ndarray | Sequence[int]],
        sampling: Sampling | None = None,
        *,
        count: int = 1,
        seed: int | None = None,
    ) -> list[list[Completion]]:
        """Continue prompts with the engines' current weights, apart from the run: nothing is scored or trained on.

        Args:
            prompts: Token ids of each prompt, int64 `[p]`.
            sampling: Sampling parameters; default: those of training.
            count: Number of continuations of each prompt.
            seed: Random seed: with the same weights, it gives each prompt the same continuations; None for the engines'
                own.

        Returns:
            The continuations of each prompt.

        Raises:
            RunError: The run has no engines that the trainer's process calls.
            EngineError: An engine failed.
            ValueFault: A prompt is not a list of token ids, or an engine refused it, such as one that is too long.
        """
        return run_async(self.sample_async(prompts, sampling, count=count, seed=seed))

    async def sample_async(
        self,
        prompts: Sequence[np.ndarray | Sequence[int]],
        sampling: Sampling | None = None,
        *,
        count: int = 1,
        seed: int | None = None,
    ) -> list[list[Completion]]:
        """Sample as `sample` does, in the running event loop."""
        self.check_usable()
        await self.catch_up()
        arrays = [token_ids(prompt) for prompt in prompts]
        return await sampled_by_hand(self.rollouts).sample(arrays, sampling, count, seed)

    def save(self) -> Path:
        """Write a checkpoint and return its folder."""
        return run_async(self.save_async())

    async def save_async(self, *, last: bool = False) -> Path:
        """Write a checkpoint as `save` does, in the running event loop.

        Args:
            last: True for the last checkpoint of the run, which may be exported.
        """
        self.check_usable()
        with self.times("checkpoints"):
            state, kept = await snapshot(self)
            for callback in self.callbacks:
                await callback.before_save(self, kept)
            folder = await asyncio.to_thread(write_checkpoint, self, state, last=last)
            self._last_saved = self.version if last else self._last_saved
            self.save_requested = False
        log.debug("step %d: saved in %s", self.version, folder)
        for callback in self.callbacks:
            await callback.after_save(self, folder)
        return folder

    async def restore(self) -> None:
        """Restore the checkpoint to resume from; a new run clears what an earlier run left in the store."""
        if self._restored:
            return
        if self._resume_from is not None:
            await restore(self, self._resume_from, self._store)
            for notice in self.record.keep_changes() if self.record else ():
                log.warning("%s", notice)
        elif self._store is not None:
            await asyncio.to_thread(self._store.rewind, 0, {})
        self._restored = True

    def sources(self) -> Mapping[str, TaskCounts]:
        """Return the counts of each task source; empty if the run samples nothing."""
        return self.rollouts.sources() if self.plan.sampled else {}

    def interrupt(self) -> None:
        """End the training after the current step, with a checkpoint."""
        if not self.interrupted:
            self.interrupted = True
            log.info(
                "interrupted after %s: the step in progress will be finished and saved", counted(self.version, "step")
            )

    def save_soon(self) -> None:
        """Save a checkpoint after the next step that syncs weights."""
        self.save_requested = True
        interval = self.plan.config.rollout.sync_interval
        step = min((self.version // interval + 1) * interval, self.steps)
        log.info("checkpoint requested: step %d will be saved", step)

    def close(self) -> None:
        """Shut down everything that `from_config` started."""
        self.__exit__(None, None, None)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: Any) -> None:
        self.closed_down = True
        if self in _OPENED:
            _OPENED.remove(self)
        self.resources.__exit__(*error)


_OPENED: list[Trainer] = []
"""The trainer that `from_config` started, until it is closed."""


async def _end(trainer: Trainer, callback: Callback, kind: type[BaseException] | None, *_: object) -> None:
    await callback.on_end(trainer, failed=kind is not None)
