"""An open run: its folder, log, Ray, rollout store and report, all closed properly however the run ends."""

from __future__ import annotations

import errno
import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import attrs
from rich.console import Console

from rlsdk.checkpoints.checkpoint import REMEDIES, Checkpoints, free_text
from rlsdk.checkpoints.mirror import Mirror, mirrored
from rlsdk.cluster.placement import joins_ray, ray_cluster
from rlsdk.cluster.watchdog import Watchdog
from rlsdk.cluster.watched import watching
from rlsdk.config import Plan
from rlsdk.errors import RunError, described
from rlsdk.isolation.reaper import reaped
from rlsdk.opening.rehearsal import Rehearsal
from rlsdk.opening.resuming import prepare_folder
from rlsdk.reporting.report import try_report
from rlsdk.rollout.generator import first_error
from rlsdk.runlog import actors
from rlsdk.runlog.actors import ActorsFile
from rlsdk.runlog.folder import FolderLock, held
from rlsdk.runlog.logs import log_console, log_to
from rlsdk.runlog.metrics import recorded
from rlsdk.runlog.observers import Observers
from rlsdk.runlog.report import draw_curves, print_report, write_summary
from rlsdk.runlog.store import Address, RolloutStore

log = logging.getLogger(__name__)


@attrs.define
class RunRecord:
    """An open run: its folder, its log and, at the end, its report.

    Attributes:
        plan: Checked configuration.
        console: Console for progress.
        checkpoints: Checkpoints of the run's folder.
        observers: Trackers and observing plugins.
        mirror: Upload of the folder, if the run has a remote one.
        resume_from: Step of the checkpoint to continue from; None for a new run.
        opened: Time at which the run was opened.
        keep_changes: Writes a changed configuration into the folder, and returns log lines.
        data_files: Fingerprints of the local files of its tasks.
        store: Rollout store; None if rollouts are not kept.
        gpus: Number of GPUs in the Ray cluster.
        by_hand: True if the trainer may outlive its training; the report is then written when training ends.
        summary: Summary of the training, once it has ended.
        samples: Sample answers of the evaluations, for the report.
        reported: True once the report is written.
        failure: The exception that ended the last training, which its caller may catch.
    """

    plan: Plan
    console: Console
    checkpoints: Checkpoints
    observers: Observers
    mirror: Mirror | None
    resume_from: int | None
    opened: float
    keep_changes: Callable[[], list[str]]
    data_files: Mapping[str, str]
    store: RolloutStore | None = None
    gpus: int = 0
    by_hand: bool = False
    summary: dict[str, Any] = attrs.field(factory=dict)
    samples: Mapping[str, Sequence[Mapping[str, Any]]] = attrs.field(factory=dict)
    reported: bool = False
    failure: BaseException | None = None

    def begin(self) -> None:
        """Note that a training begins, which may follow an earlier one by hand: the report will be of this one."""
        self.summary, self.samples, self.reported, self.failure = {}, {}, False, None

    def finish(self, summary: dict[str, Any], samples: Mapping[str, Sequence[Mapping[str, Any]]]) -> None:
        """Take the summary of the training. It is reported when everything has ended or, if `by_hand`, at once."""
        self.summary, self.samples = summary, samples
        if self.by_hand:
            self.report()

    def report(self) -> None:
        """Write and show the summary.

        Raises:
            RunError: The training has failed.
            OSError: The summary cannot be written.
        """
        plan, summary = self.plan, self.summary
        self.reported = True
        if not summary:  # only single steps by hand: no training has ended
            self.end("finished", {})
            return
        summary["seconds"]["whole"] = time.perf_counter() - self.opened
        try:
            curves = draw_curves(plan.folder, plan.config.name)
            summary["curves"] = str(curves) if curves else None
            write_summary(plan.folder, summary)
            if self.mirror is not None:
                summary["upload"] = self.mirror.finish()
                summary["warnings"] += filter(None, [summary["upload"]["warning"]])
                write_summary(plan.folder, summary)
        except OSError as error:
            self.end("failed", {"error": str(error)})
            raise
        except KeyboardInterrupt:  # the user did not wait for the upload
            self.end(summary["status"], summary)
            raise
        try_report(plan.folder)
        times = ", ".join(f"{name} {value:.1f}" for name, value in summary["seconds"].items())
        log.debug("%s after step %d; seconds: %s", summary["status"], summary["steps"], times)
        print_report(self.console, summary, self.samples)
        self.end(summary["status"], summary)
        if summary["status"] == "failed":
            raise RunError(summary["error"])

    def end(self, status: str, summary: Mapping[str, Any]) -> None:
        """Record the end of the run in its folder, and report it to all observers."""
        try:
            actors.mark_ended(self.plan.folder, status)
        except (OSError, RunError) as error:  # a disk that is full or read-only must not hide why the run ended
            log.warning("cannot record that the run has %s: %s", status, error)
        self.tell_end(status, summary)

    def tell_end(self, status: str, summary: Mapping[str, Any]) -> None:
        """Report the end of the run to all observers, and write nothing; see `end`."""
        self.observers.tell("rlsdk_run_end", status=status, summary=summary)
        for name, fate in self.observers.close().items():
            log.warning("%s: %s", name, fate)


_OPEN: list[Path] = []
"""Folder of the run that is open in this program."""


@contextmanager
def only_run(folder: Path) -> Iterator[None]:
    """Refuse a second run in the same program while the block runs, since the actors of both would have equal names.

    Raises:
        RunError: Another run is open in this program.
    """
    if _OPEN:
        raise RunError(
            f"this program has another trainer open, in {_OPEN[0]}: close it first (trainer.close(), the end of its "
            "`with` block or, if its variable is gone, rlsdk.Trainer.close_open()), or train in another process"
        )
    _OPEN.append(folder)
    try:
        yield
    finally:
        _OPEN.clear()


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
    """Open a run for one-program training, or for the trainer of two programs: folder, log, rollout store, Ray.

    The options are those of `rlsdk.train`; `rehearsed` is the result of the reward rehearsal, for the log.

    Raises:
        RunError: Another run is open in this program, or the run failed.
    """
    console = console or log_console()
    opened = time.perf_counter()
    observers = Observers(plan.plugins)
    # Before the folder exists, so that the same command works once the address is corrected.
    ray_start = "joining Ray" if joins_ray(plan.config.placement) else "starting Ray"

    with (
        only_run(plan.folder),
        held(plan.folder) as lock,
        mirrored(plan, resume=resume, overwrite=overwrite) as mirror,
        watching(plan.config.watchdog, partial(_abandon, plan, lock), ActorsFile(plan.folder).report) as watchdog,
    ):
        watchdog.add_check(lock.loss)
        checkpoints = Checkpoints(plan.folder, plan.config.checkpoint.keep, saved=mirror.saved if mirror else None)
        with _explaining(checkpoints):
            prepared = prepare_folder(
                plan, checkpoints, resume=resume, overwrite=overwrite, allow_changes=allow_changes
            )
        log_to(plan, console, "driver.log")
        actors.clear_status(plan.folder)
        for notice in (*(mirror.notices if mirror else ()), *prepared.notices):
            log.warning("%s", notice)
        if mirror:
            mirror.begin(prepared.step)
        (rehearsed or Rehearsal()).log()
        log.info("%s; the full log is %s", ray_start, plan.folder / "logs" / "driver.log")
        resumed = prepared.step, opened, prepared.keep_changes, prepared.data
        record = RunRecord(plan, console, checkpoints, observers, mirror, *resumed)
        with (
            recorded(plan.folder),
            _reported(record, watchdog, lock),
            kept_rollouts(plan) as record.store,
            reaped(),
            ray_cluster(plan, trains=True) as record.gpus,
        ):
            yield record


@contextmanager
def _reported(record: RunRecord, watchdog: Watchdog, lock: FolderLock) -> Iterator[None]:
    """Context manager: report the run at the end of the block, or why an exception has ended it.

    An exception that ended the training has ended the run too, even if the block has caught it.
    """

    def end(error: BaseException) -> BaseException:
        cause = _explained(first_error(error), record.checkpoints)
        cause = watchdog.explain(cause, _kept(record.checkpoints))
        _end_failed(record, error, cause, ours=not lock.loss())
        return cause

    try:
        yield
        watchdog.check()
        if record.failure is not None:
            end(record.failure)
        elif not record.reported:
            record.report()
    except BaseException as error:
        if (cause := end(error)) is error:
            raise
        raise cause from error


@contextmanager
def _explaining(checkpoints: Checkpoints) -> Iterator[None]:
    """Context manager: errors such as a full disk say what is kept and what to do."""
    try:
        yield
    except OSError as error:
        if (cause := _explained(error, checkpoints)) is error:
            raise
        raise cause from error


def _abandon(plan: Plan, lock: FolderLock, verdict: str) -> None:
    """Record the failure of a run whose process the watchdog is about to end."""
    log.error("the run did not end when asked to; its process exits now: %s", verdict)
    if not lock.loss():  # otherwise the folder is another program's
        write_summary(plan.folder, _failure(plan, verdict))
        actors.mark_ended(plan.folder, "failed")


def _explained(error: BaseException, checkpoints: Checkpoints) -> BaseException:
    """Turn an operating-system error with a known remedy into one that says what is kept and what to do."""
    if not isinstance(error, OSError) or error.errno not in REMEDIES:
        return error
    what, where = error.strerror, error.filename or "while writing"
    if error.errno == errno.ENOSPC:
        what, where = "the disk is full", f"{where}; {free_text(error.filename or checkpoints.path(0))}"
    return RunError(f"{what} ({where}); {_kept(checkpoints)}. {REMEDIES[error.errno]}, then continue with --resume")


def _kept(checkpoints: Checkpoints) -> str:
    kept = checkpoints.latest()
    return f"the checkpoint of step {kept} is kept" if kept is not None else "there is no checkpoint yet"


def _end_failed(record: RunRecord, error: BaseException, cause: BaseException, *, ours: bool) -> None:
    """Write the summary and report of a run that an exception ended; errors here are only logged.

    Nothing is written to a folder that is not `ours` any more, since another program has taken it over.
    """
    log.debug("the run failed: %s", cause, exc_info=error)  # the caller gets the error itself
    if record.reported:
        return
    if not ours:
        record.tell_end("failed", {"error": str(cause)})
        return
    plan, whole = record.plan, time.perf_counter() - record.opened
    status = "interrupted" if isinstance(cause, KeyboardInterrupt) else "failed"
    try:
        said = str(cause) or type(cause).__name__
        if isinstance(cause, KeyboardInterrupt):
            said = f"interrupted; {_kept(record.checkpoints)}. Continue with --resume"
        write_summary(plan.folder, {**_failure(plan, said), "status": status, "seconds": {"whole": whole}})
        try_report(plan.folder)
    except BaseException as fault:  # noqa: BLE001 - a full disk, or Ctrl-C: the run's own error is about to be raised
        log.warning("the report of the failed run cannot be written: %s", described(fault))
    record.end(status, {"error": str(cause)})


def _failure(plan: Plan, error: str) -> dict[str, Any]:
    return {"name": plan.config.name, "status": "failed", "error": error}


@contextmanager
def kept_rollouts(plan: Plan) -> Iterator[RolloutStore | None]:
    """Context manager: open a plan's rollout store, or give None if rollouts are not kept."""
    if not plan.config.save_rollouts:
        yield None
        return
    section = plan.config.rollout.storage
    store = RolloutStore(Address.make(plan.folder, section.url, section.password_env))
    try:
        yield store
    finally:
        store.close()
