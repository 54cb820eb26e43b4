"""Callbacks around the training step: storage, evaluation, checkpoints and, in `observing`, logs and diagnoses.

`standard_callbacks` defines their order. Engines are scaled, the step runs, its rollouts are stored, the policy is
evaluated, your own callbacks run, diagnoses read the metrics, everything is logged, and a checkpoint is saved. A metric
that your callback adds is therefore diagnosed and logged, and a change that it makes is in the checkpoint. When
training ends, callbacks end in reverse order.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
import os
import platform
from collections.abc import Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs
from rich.console import Console

from rlsdk.cluster.nodes import DrainingNode, watch_nodes
from rlsdk.contracts.rollouts import Evaluation, NoRolloutsError, UnscoredEvaluationError
from rlsdk.errors import ScoringError
from rlsdk.options import unknown
from rlsdk.runlog.actors import EngineScaling, clear_status, requested_engines, write_status
from rlsdk.runlog.observers import Observers
from rlsdk.runlog.report import figure_text
from rlsdk.runlog.store import RolloutStore, RolloutWriter
from rlsdk.runlog.tables import EVALUATED, Entry, evaluated_entries

if TYPE_CHECKING:
    from rlsdk.learners.apart import DividedLearnerGroup
    from rlsdk.trainer.trainer import Trainer

log = logging.getLogger(__name__)
Metrics = dict[str, float | None]
_WHEN = ("on_", "before_", "after_")
"""Prefixes of callback method names."""


class Callback:
    """Base class of callbacks. Every method is optional; an exception in one ends the run."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Reject a method that would never be called or cannot be awaited."""
        super().__init_subclass__(**kwargs)
        hooks = [name for name in vars(Callback) if name.startswith(_WHEN)]
        for name, value in vars(cls).items():
            if name in hooks and inspect.isfunction(value) and not inspect.iscoroutinefunction(inspect.unwrap(value)):
                raise TypeError(f"{cls.__name__}.{name} must be `async def`")
            if name.startswith(_WHEN) and inspect.iscoroutinefunction(value) and not hasattr(Callback, name):
                raise TypeError(f"{cls.__name__}: {unknown('method of callbacks', name, hooks)}")

    async def on_start(self, trainer: Trainer) -> None:
        """Run before the first weights are published; a resumed trainer is already restored."""

    async def before_training(self, trainer: Trainer, metrics: Metrics) -> None:
        """Run before the first step, once the engines have the first weights; metrics added here are logged."""

    async def before_step(self, trainer: Trainer) -> None:
        """Run before a step."""

    async def after_step(self, trainer: Trainer, metrics: Metrics) -> None:
        """Run after a step; may add metrics. `trainer.version` already counts this step."""

    async def before_save(self, trainer: Trainer, kept: Sequence[Entry]) -> None:
        """Run before a checkpoint is written; it refers to the groups `kept`."""

    async def after_save(self, trainer: Trainer, folder: Path) -> None:
        """Run after a checkpoint is written."""

    async def on_end(self, trainer: Trainer, *, failed: bool) -> None:
        """Run when training ends; `failed` is True if an error ended it."""

    async def on_summary(self, trainer: Trainer, summary: dict[str, Any]) -> None:
        """Add to the summary; not called if an error ended the training."""


class Scaling(Callback):
    """Scale to the number of engines that `rlsdk engines` requests, and record the current state."""

    def __init__(self) -> None:
        self._last: EngineScaling | None = None

    async def on_start(self, trainer: Trainer) -> None:
        """Delete the status that an earlier training by hand has left, which says that the run has ended."""
        clear_status(trainer.plan.folder)
        self._last = None

    async def before_step(self, trainer: Trainer) -> None:
        """Request the desired number of engines, and record the current state."""
        folder = trainer.plan.folder
        if not trainer.plan.needs_engine:
            return
        status = await trainer.rollouts.scale(requested_engines(folder))
        state = EngineScaling(**attrs.asdict(status), driver=os.getpid(), host=platform.node())
        if state == self._last:
            return
        if status.refused and (self._last is None or status.refused != self._last.refused):
            log.warning("%s", status.refused)
        write_status(folder, state)
        self._last = state


class RolloutStorage(Callback):
    """Store the groups of every `save_rollouts`-th step, and those that a checkpoint refers to."""

    def __init__(self, store: RolloutStore) -> None:
        self._store = store
        self._writer: RolloutWriter | None = None

    @property
    def writer(self) -> RolloutWriter:
        """Writer thread, started on first use."""
        if self._writer is None:
            self._writer = RolloutWriter(self._store)
        return self._writer

    async def after_step(self, trainer: Trainer, metrics: Metrics) -> None:
        """Store the groups of the step."""
        every, step = trainer.plan.config.save_rollouts, trainer.version
        await self.writer.submit(partial(_store_step, trainer.closed, step=step, every=every))

    async def store_evaluation(self, step: int, found: Evaluation) -> None:
        """Store the answers of an evaluation."""
        entries = evaluated_entries(step, dict(zip(EVALUATED, (found.greedy, found.sampled), strict=True)))
        await self.writer.submit(lambda store: store.put(entries))

    async def before_save(self, trainer: Trainer, kept: Sequence[Entry]) -> None:
        """Store the groups that the checkpoint refers to before it is written."""
        await self.writer.submit(lambda store: store.put(kept))
        await self.writer.flush()

    async def after_save(self, trainer: Trainer, folder: Path) -> None:
        """Drop groups that only deleted checkpoints referred to."""
        every, oldest = trainer.plan.config.save_rollouts, trainer.checkpoints.oldest()
        await self.writer.submit(lambda store: store.forget(oldest, every))

    async def on_end(self, trainer: Trainer, *, failed: bool) -> None:
        """Store the groups of a step that ended the run since too few could be scored; write what is still queued."""
        unscored = [entry for entry in trainer.closed if entry.step == trainer.version + 1]
        if failed and unscored:
            await self.writer.submit(lambda store: store.put(unscored))
        writer, self._writer = self._writer, None
        if writer is not None:
            await asyncio.to_thread(writer.close)


def _store_step(entries: Sequence[Entry], store: RolloutStore, *, step: int, every: int) -> None:
    """Store a step's groups every `every` steps; on other steps, only update the status of stored groups."""
    fresh = [entry for entry in entries if entry.step == step]
    if step % every == 0:
        store.put(fresh)
    store.settle([(e.number, e.state, e.step, e.uses) for e in entries])


class Evaluating(Callback):
    """Evaluate before training, every `eval.every` steps and after the last step, as configured.

    With `rollout.sync_interval` above 1, an evaluation waits for the next sync, since the engines have older weights
    until then.
    """

    def __init__(self, console: Console, storage: RolloutStorage | None) -> None:
        self._console, self._storage = console, storage

    async def before_training(self, trainer: Trainer, metrics: Metrics) -> None:
        """Evaluate the initial model, or the final one if all steps were taken by hand."""
        section = trainer.plan.config.eval
        if not trainer.rollouts.eval_tasks:
            return
        if section.before and trainer.version == 0:
            metrics |= await self._evaluate(trainer, "before")
        elif section.after and trainer.ended_by_hand:
            await self._evaluate_trained(trainer, metrics)

    async def after_step(self, trainer: Trainer, metrics: Metrics) -> None:
        """Evaluate if this step is due."""
        section, interval = trainer.plan.config.eval, trainer.plan.config.rollout.sync_interval
        unsynced = trainer.version % interval or interval  # steps since the previous sync; fewer before the last one
        due = section.every and trainer.version % section.every < unsynced and trainer.sync_due
        if trainer.rollouts.eval_tasks and (due or (trainer.ended and section.after)):
            await self._evaluate_trained(trainer, metrics)

    async def _evaluate_trained(self, trainer: Trainer, metrics: Metrics) -> None:
        if not trainer.sync_due:  # the run ends early, between syncs
            await trainer.publish()
        try:
            metrics |= await self._evaluate(trainer, "after")
        except NoRolloutsError as error:
            log.warning("step %d is not evaluated: %s", trainer.version, error)
        except ScoringError:
            # Keep the training even if the evaluation failed.
            folder = await trainer.save_async(last=trainer.ended)
            log.warning("the evaluation failed; the training up to step %d is saved in %s", trainer.version, folder)
            raise

    async def _evaluate(self, trainer: Trainer, when: str) -> Metrics:
        try:
            found = await trainer.evaluate_async()
        except UnscoredEvaluationError as error:
            await self._store(trainer.version, error.evaluation)
            raise
        trainer.samples[when] = found.samples
        await self._store(trainer.version, found)
        accuracy = "  ".join(f"{name} {figure_text(value)}" for name, value in found.accuracy.items())
        self._console.print(f"step {trainer.version}: held-out accuracy {accuracy}", highlight=False)
        log.debug("step %d: held-out accuracy %s", trainer.version, accuracy)
        return dict(found.metrics)

    async def _store(self, step: int, found: Evaluation) -> None:
        if self._storage is not None:
            await self._storage.store_evaluation(step, found)


class Saving(Callback):
    """Save a checkpoint every `checkpoint.every` steps, after the last step, and on request.

    With `rollout.sync_interval` above 1, every checkpoint but the last waits for the next sync.
    """

    async def before_training(self, trainer: Trainer, metrics: Metrics) -> None:
        """Save the last checkpoint if all steps were taken by hand."""
        if trainer.ended_by_hand:
            await trainer.save_async(last=True)

    async def after_step(self, trainer: Trainer, metrics: Metrics) -> None:
        """Save if a checkpoint is due at this step or was due since the previous sync."""
        every, interval = trainer.plan.config.checkpoint.every, trainer.plan.config.rollout.sync_interval
        last = trainer.ended or trainer.interrupted
        due = trainer.save_requested or (every and trainer.version % every < interval)
        # Between syncs the engines have older weights than the learner, and checkpoints do not hold them.
        if last or (due and trainer.sync_due):
            await trainer.save_async(last=last)
            if trainer.interrupted and not last and trainer.plan.config.checkpoint.export == "last":
                await trainer.save_async(last=True)  # interrupted while it was saved without an export


class LeavingNodes(Callback):
    """End the run after its step, with a checkpoint, if the node of a learner rank or of this program is drained."""

    def __init__(self, learner: DividedLearnerGroup) -> None:
        """Create a callback that watches the learner's nodes."""
        self._learner = learner
        self._places: dict[str, list[str]] = {}
        self._watch: asyncio.Task[None] | None = None
        self._reason = ""

    async def on_start(self, trainer: Trainer) -> None:
        """Look up the node of each rank while the ranks are idle, and start watching."""
        import ray

        self._places = {ray.get_runtime_context().get_node_id(): ["this program"]}
        for name, actor in self._learner.named_actors().items():
            self._places.setdefault((await actor.identity.remote()).node, []).append(name)
        self._watch = asyncio.get_running_loop().create_task(watch_nodes(partial(self.leave, trainer)))

    async def leave(self, trainer: Trainer, nodes: Sequence[DrainingNode]) -> None:
        """End the run if it depends on one of these nodes."""
        found = {node: self._places[node.id] for node in nodes if node.id in self._places}
        if not found or self._reason:
            return
        places = [f"{' and '.join(who)} {'is' if len(who) == 1 else 'are'} on {node}" for node, who in found.items()]
        self._reason = (
            f"{'; '.join(places)}. The run ends after its step, with a checkpoint; --resume continues it on other nodes"
        )
        log.warning("%s", self._reason)
        trainer.interrupt()

    async def after_step(self, trainer: Trainer, metrics: Metrics) -> None:
        """Save before the export is written, since the node may leave before the export is complete."""
        if self._reason and trainer.plan.config.checkpoint.export == "last":
            await trainer.save_async()

    async def on_end(self, trainer: Trainer, *, failed: bool) -> None:
        """Stop watching."""
        if self._watch is not None:
            self._watch.cancel()

    async def on_summary(self, trainer: Trainer, summary: dict[str, Any]) -> None:
        """Add why the run ended early."""
        summary["warnings"] += filter(None, [self._reason])


def standard_callbacks(
    console: Console,
    observers: Observers,
    store: RolloutStore | None,
    own: Iterable[Callback] = (),
    before_saving: Iterable[Callback] = (),
) -> list[Callback]:
    """Return the callbacks of a run, in their order: `own` are the user's; `before_saving` run after logging."""
    from rlsdk.trainer.observing import Diagnosing, Logging

    storage = None if store is None else RolloutStorage(store)
    stored = [] if storage is None else [storage]
    evaluating = Evaluating(console, storage)
    logged = [Diagnosing(), Logging(observers, console, store)]
    return [Scaling(), *stored, evaluating, *own, *logged, *before_saving, Saving()]


def checked_callbacks(given: Iterable[Callback]) -> list[Callback]:
    """Return the user's callbacks as a list.

    Raises:
        TypeError: An item is not a callback instance, such as a class.
    """
    if isinstance(given, Callback):
        raise TypeError(f"callbacks: expected a list, got one callback; write callbacks=[{type(given).__name__}(…)]")
    found = list(given)
    for each in found:
        if isinstance(each, type):
            raise TypeError(f"callbacks: expected an instance, got the class; write {each.__name__}(…)")
        if not isinstance(each, Callback):
            raise TypeError(f"callbacks: expected subclasses of rlsdk.Callback, got {each!r:.80}")
    return found
