"""A run from a checked plan to its report: folder, log, Ray, actors, a trainer, and a clean end whatever happens."""

from __future__ import annotations

import errno
import logging
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, TypeVar

import attrs
from rich.console import Console

from rlsdk.checkpoints.checkpoint import REMEDIES, Checkpoints
from rlsdk.cluster.placement import ray_cluster
from rlsdk.config import Plan, check
from rlsdk.contracts.rollouts import Rollouts
from rlsdk.engines.starting import exchanged_adapter
from rlsdk.environments.fleet import world_workers
from rlsdk.errors import RunError
from rlsdk.isolation.reaper import reaped
from rlsdk.learners.group import LearnerGroup
from rlsdk.loops import UserLoop
from rlsdk.readiness.checks import examine
from rlsdk.rollout.producer import first_error
from rlsdk.runlog import attendance
from rlsdk.runlog.observers import Observers
from rlsdk.runlog.progress import log_console
from rlsdk.runlog.report import draw_curves, print_report, write_summary
from rlsdk.runlog.store import Address, RolloutStore
from rlsdk.scoring.actors import scoring
from rlsdk.trainer.actors import start_actors
from rlsdk.trainer.assembly import explorer_of, steps_of
from rlsdk.trainer.callbacks import Callback, standard_callbacks
from rlsdk.trainer.folder import held
from rlsdk.trainer.interactive import ThreadedRollouts, run_async
from rlsdk.trainer.logs import log_to
from rlsdk.trainer.mirror import Mirror, mirrored
from rlsdk.trainer.rehearsal import Rehearsal, rehearse
from rlsdk.trainer.resuming import check_resumed, prepare_folder
from rlsdk.trainer.trainer import Trainer
from rlsdk.trainer.watchdog import watching
from rlsdk.types import Task

log = logging.getLogger(__name__)
AnyTrainer = TypeVar("AnyTrainer", bound=Trainer)


def train(
    config: str | Path | Mapping[str, Any],
    *overrides: str,
    plugins: Sequence[str | Path] = (),
    resume: bool | int = False,
    overwrite: bool = False,
    allow_changes: bool = False,
    console: Console | None = None,
) -> dict[str, Any]:
    """Train a model.

    Args:
        config: A YAML file, or a mapping in which marked objects may stand where names stand.
        *overrides: `key=value` texts.
        plugins: Files of plugins.
        resume: Continue from the run's newest whole checkpoint (from the beginning, if there is none), or, given a
            number, from that of this step; newer ones are kept under another name.
        overwrite: Delete what an earlier run left in the folder.
        allow_changes: Resume although settings differ that change the meaning of the run.
        console: Console for progress; left out, standard error.

    Returns:
        The summary, as in `summary.json`; `status` is "finished" or "interrupted".

    Raises:
        ConfigError: The configuration is wrong; nothing was started.
        RlsdkError: The run failed; the message names the culprit.
    """
    plan = (check if resume is False else check_resumed)(config, overrides, plugins)
    return run(plan, resume=resume, overwrite=overwrite, allow_changes=allow_changes, console=console)


def run(
    plan: Plan,
    *,
    resume: bool | int = False,
    overwrite: bool = False,
    allow_changes: bool = False,
    console: Console | None = None,
) -> dict[str, Any]:
    """Train by a checked plan; see `train`."""
    tasks, rehearsed = _examined(plan)
    how: dict[str, Any] = {"resume": resume, "overwrite": overwrite, "allow_changes": allow_changes}
    with (
        open_run(plan, console=console, rehearsed=rehearsed, **how) as record,
        start_trainer(Trainer, record, tasks) as trainer,
    ):
        trainer.train()
    return record.summary


def open_trainer(
    kind: type[AnyTrainer],
    config: str | Path | Mapping[str, Any],
    overrides: Sequence[str],
    plugins: Sequence[str | Path],
    *,
    callbacks: Iterable[Callback],
    console: Console | None,
    resume: bool | int,
    overwrite: bool,
    allow_changes: bool,
) -> AnyTrainer:
    """Start everything that a trainer needs; see `Trainer.from_config`.

    Args:
        kind: Trainer, or a subclass.
        config: Configuration.
        overrides: Settings as `key=value` texts.
        plugins: Files of plugins.
        callbacks: Callbacks of the user.
        console: Console for progress; None: standard error.
        resume: Continue from the run's newest whole checkpoint, or from that of a step.
        overwrite: Delete what an earlier run left in the folder.
        allow_changes: Resume although settings differ that change the meaning of the run.
    """
    plan = (check if resume is False else check_resumed)(config, overrides, plugins)
    tasks, rehearsed = _examined(plan)
    how: dict[str, Any] = {"resume": resume, "overwrite": overwrite, "allow_changes": allow_changes}
    with ExitStack() as stack:
        record = stack.enter_context(open_run(plan, console=console, rehearsed=rehearsed, **how))
        record.by_hand = True
        trainer = stack.enter_context(start_trainer(kind, record, tasks, callbacks))
        run_async(trainer.prepare())
        trainer.resources = stack.pop_all()
    return trainer


def _examined(plan: Plan) -> tuple[Sequence[Sequence[Task]], Rehearsal]:
    """Check for everything that would keep a run from starting; returns its tasks and the trial of its reward."""
    exchanged_adapter(plan)  # an adapter that the engine cannot serve is an error before anything starts
    ready = examine(plan).require()
    return ready.tasks, run_async(rehearse(plan, ready.tasks))


@attrs.define
class RunRecord:
    """A run that is open: its folder, its log and, in the end, its report.

    Attributes:
        plan: Checked configuration.
        console: Console for a person.
        checkpoints: Checkpoints of the run's folder.
        observers: Trackers and plugins that observe.
        mirror: Upload of the folder, where the run's own is remote.
        store: Store of rollouts; None if they are not kept.
        gpus: Number of Ray's GPUs.
        resume_from: Step of the checkpoint to continue from; None for a new run.
        opened: Time at which the run was opened.
        by_hand: True if the trainer outlives its training, so that the report does not wait for its end.
        summary: Summary of the training, once it has ended.
        samples: Answers of the evaluations, for a person.
        reported: True once the report is written.
    """

    plan: Plan
    console: Console
    checkpoints: Checkpoints
    observers: Observers
    mirror: Mirror | None
    store: RolloutStore | None
    gpus: int
    resume_from: int | None
    opened: float
    by_hand: bool = False
    summary: dict[str, Any] = attrs.field(factory=dict)
    samples: Mapping[str, Sequence[Mapping[str, Any]]] = attrs.field(factory=dict)
    reported: bool = False

    def trainer(
        self,
        kind: type[AnyTrainer],
        rollouts: Rollouts,
        learner: LearnerGroup,
        steps: int,
        callbacks: Iterable[Callback] = (),
    ) -> AnyTrainer:
        """Create the trainer of this run.

        Args:
            kind: Trainer, or a subclass.
            rollouts: Source of rollouts, ready.
            learner: Learner, started.
            steps: Steps of the run.
            callbacks: Callbacks of the user.
        """
        trainer = kind(
            self.plan,
            rollouts=rollouts,
            learner=learner,
            steps=steps,
            checkpoints=self.checkpoints,
            store=self.store,
            resume_from=self.resume_from,
            callbacks=standard_callbacks(self.console, self.observers, self.store, callbacks),
        )
        trainer.record = self
        trainer.times.seconds["start"] = time.perf_counter() - self.opened
        log.debug("ready after %.1f s", trainer.times.seconds["start"])
        return trainer

    def finish(self, trainer: Trainer, summary: dict[str, Any]) -> None:
        """Take the summary of the training; it is reported when everything has ended or, by hand, at once."""
        self.summary, self.samples = summary, trainer.samples
        if self.by_hand:
            self.report()

    def report(self) -> None:
        """Write and show the summary.

        Raises:
            RunError: The training has failed.
        """
        plan, summary = self.plan, self.summary
        self.reported = True
        if not summary:  # steps by hand alone: nobody trained to the end
            self.end("finished", {})
            return
        summary["seconds"]["whole"] = time.perf_counter() - self.opened
        curves = draw_curves(plan.folder, plan.config.name)
        summary["curves"] = str(curves) if curves else None
        if self.mirror is not None:
            summary["upload"] = self.mirror.finish()
            summary["warnings"] += filter(None, [summary["upload"]["warning"]])
        write_summary(plan.folder, summary)
        times = ", ".join(f"{name} {value:.1f}" for name, value in summary["seconds"].items())
        log.debug("%s after step %d; seconds: %s", summary["status"], summary["steps"], times)
        print_report(self.console, summary, self.samples)
        self.end(summary["status"], summary)
        if summary["status"] == "failed":
            raise RunError(summary["error"])

    def end(self, status: str, summary: Mapping[str, Any]) -> None:
        """Report the end of the run to all observers.

        Args:
            status: "finished", "interrupted" or "failed".
            summary: Summary of the run.
        """
        attendance.end(self.plan.folder, status)
        self.observers.tell("rlsdk_run_end", status=status, summary=summary)
        for name, fate in self.observers.close().items():
            log.warning("%s: %s", name, fate)


@contextmanager
def open_run(
    plan: Plan,
    *,
    resume: bool | int,
    overwrite: bool,
    allow_changes: bool,
    console: Console | None,
    rehearsed: Rehearsal | None = None,
) -> Iterator[RunRecord]:
    """Open a run for a training in one program, or for the trainer of two: folder, log, store of rollouts, Ray.

    Args:
        plan: Checked configuration.
        resume: Continue from the newest whole checkpoint, or from that of a step.
        overwrite: Delete what an earlier run left in the folder.
        allow_changes: Resume although settings differ that change the meaning of the run.
        console: Console for a person; None: standard error.
        rehearsed: Trial of the reward, for the log.
    """
    console = console or log_console()
    opened = time.perf_counter()
    observers = Observers(plan.plugins)

    def abandon(verdict: str) -> None:
        log.error("the run did not end when it was told to; its process exits: %s", verdict)
        write_summary(plan.folder, _failure(plan, verdict))
        attendance.end(plan.folder, "failed")

    with (
        held(plan.folder),
        mirrored(plan, resume=resume, overwrite=overwrite) as mirror,
        watching(plan.config.watchdog, abandon) as watchdog,
    ):
        checkpoints = Checkpoints(plan.folder, plan.config.checkpoint.keep, saved=mirror.saved if mirror else None)
        prepared = prepare_folder(plan, checkpoints, resume=resume, overwrite=overwrite, allow_changes=allow_changes)
        log_to(plan, console, "driver.log")
        attendance.begin(plan.folder)
        for notice in (*(mirror.notices if mirror else ()), *prepared.notices):
            log.warning("%s", notice)
        if mirror:
            mirror.begin(prepared.step)
        if rehearsed is not None:
            rehearsed.log()
        record = RunRecord(plan, console, checkpoints, observers, mirror, None, 0, prepared.step, opened)
        try:
            with kept_rollouts(plan) as record.store, reaped(), ray_cluster(plan) as record.gpus:
                yield record
            watchdog.check()
        except BaseException as error:
            cause = watchdog.explain(_explained(first_error(error), checkpoints), _kept(checkpoints))
            if watchdog.verdict:
                write_summary(plan.folder, _failure(plan, str(cause)))
            log.debug("the run failed: %s", cause, exc_info=error)  # whoever called is told by the error itself
            if not record.reported:
                record.end("failed", {"error": str(cause)})
            if cause is error:
                raise
            raise cause from error
        if not record.reported:
            record.report()


@contextmanager
def start_trainer(
    kind: type[AnyTrainer], record: RunRecord, tasks: Sequence[Sequence[Task]], callbacks: Iterable[Callback] = ()
) -> Iterator[AnyTrainer]:
    """Start engines, learner, scorer and environments in this program, and a trainer on them; they end with the block.

    Args:
        kind: Trainer, or a subclass.
        record: Run that it belongs to.
        tasks: Tasks of each source to train on.
        callbacks: Callbacks of the user.
    """
    plan = record.plan
    steps = steps_of(plan, tasks)
    actors = start_actors(plan, record.gpus, steps)
    try:
        logs = plan.folder / "logs"
        with (
            UserLoop() as user_loop,
            scoring(plan, log_to=logs / "scoring.log", user_loop=user_loop) as scorer,
            world_workers(plan) as worlds,
        ):
            explorer = explorer_of(
                plan, actors.engines, actors.layout, tasks, scorer, worlds, record.observers, user_loop
            )
            if not record.by_hand:
                try:
                    yield record.trainer(kind, explorer, actors.learner, steps, callbacks)
                finally:
                    explorer.engines.close()
                return
            rollouts = ThreadedRollouts(explorer)
            try:
                yield record.trainer(kind, rollouts, actors.learner, steps, callbacks)
            finally:
                run_async(rollouts.close())
    finally:
        actors.stop()


def _explained(error: BaseException, checkpoints: Checkpoints) -> BaseException:
    """Turn an operating-system error that a person can remedy into one that says what is kept and what to do."""
    if not isinstance(error, OSError) or error.errno not in REMEDIES:
        return error
    what = "the disk is full" if error.errno == errno.ENOSPC else error.strerror
    where = error.filename or "while writing"
    return RunError(f"{what} ({where}); {_kept(checkpoints)}. {REMEDIES[error.errno]}, then go on with --resume")


def _kept(checkpoints: Checkpoints) -> str:
    kept = checkpoints.latest()
    return f"the checkpoint of step {kept} is kept" if kept is not None else "there is no checkpoint yet"


def _failure(plan: Plan, error: str) -> dict[str, Any]:
    return {"name": plan.config.name, "status": "failed", "error": error}


@contextmanager
def kept_rollouts(plan: Plan) -> Iterator[RolloutStore | None]:
    """Open the store of a plan's rollouts, None if they are not kept; closed with the block."""
    if not plan.config.save_rollouts:
        yield None
        return
    section = plan.config.rollout.storage
    store = RolloutStore(Address.make(plan.folder, section.url, section.password_env))
    try:
        yield store
    finally:
        store.close()
