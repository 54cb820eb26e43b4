"""Callbacks that report on a run: logs and trackers, diagnoses, sample rollouts on the console."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs
import numpy as np
from rich.console import Console
from rich.text import Text

from rlsdk.config import defaults
from rlsdk.contracts import History, Run
from rlsdk.errors import RunError, visible
from rlsdk.isolation.process_settings import ProcessSettings, told
from rlsdk.plugins import ComponentRef, load, short_name
from rlsdk.runlog.alerts import Alert, Diagnoses, append_alerts, begin_alerts
from rlsdk.runlog.logs import ProgressLine
from rlsdk.runlog.metrics import METRICS, note_ledger, read_metrics
from rlsdk.runlog.observers import CLOSE_SECONDS, Observers, ObserverThread
from rlsdk.runlog.report import SUMMARY
from rlsdk.runlog.serialization import exchange
from rlsdk.runlog.tables import Entry
from rlsdk.trainer.callbacks import Callback, Metrics

if TYPE_CHECKING:
    from rlsdk.learners.group import LearnerGroup
    from rlsdk.runlog.store import RolloutStore
    from rlsdk.trainer.trainer import Trainer

log = logging.getLogger(__name__)
LEVELS = {"info": logging.INFO, "warning": logging.WARNING, "critical": logging.ERROR}
FAILED_CLOSE_SECONDS = 5.0
"""Timeout in seconds for the trackers of a failed run to close."""


class Logging(Callback):
    """Log metrics to `metrics.jsonl`, the trackers, observing plugins and the console."""

    def __init__(self, observers: Observers, console: Console, store: RolloutStore | None) -> None:
        """Create a callback; the file of the rollout store, if any, must not be deleted during the run."""
        self._observers, self._console = observers, console
        self._database = [Path(store.address.file)] if store is not None and store.address.is_file else []
        self._metrics: Any = load("tracker", defaults.TRACKER.name)
        self._bar: ProgressLine | None = None
        self._fates: dict[str, str] = {}
        self._settings: ProcessSettings
        self._reported: set[str] = set()

    async def on_start(self, trainer: Trainer) -> None:
        """Open the trackers."""
        self._settings = ProcessSettings()
        plan = trainer.plan
        run = Run(plan.config.name, plan.folder, plan.tree, trainer.version)
        (plan.folder / SUMMARY).unlink(missing_ok=True)  # from an earlier start that was killed
        self._observers.tell("rlsdk_run_start", config=plan.tree, folder=plan.folder)
        self._observers.open(named_trackers(plan.plugins.resolve, plan.trackers), run)
        self._metrics.open(run)

    async def before_training(self, trainer: Trainer, metrics: Metrics) -> None:
        """Log metrics from before the first step, and start the progress line."""
        self._bar = ProgressLine(self._console, trainer.steps, trainer.version, trainer.sources)
        if metrics:
            self._log(trainer.version, metrics)

    async def after_step(self, trainer: Trainer, metrics: Metrics) -> None:
        """Log a step.

        Raises:
            RunError: The run's folder, or a file in it, is gone; what was trained is saved where it was.
        """
        self._keep_settings()
        self._log(trainer.version, metrics)
        files = [trainer.plan.folder / METRICS, *self._database]
        if gone := [file for file in files if not file.is_file()]:  # otherwise, later steps would be written nowhere
            folder = await trainer.save_async(last=True)
            raise RunError(
                f"{gone[0]} was deleted or moved during the run, perhaps with the whole folder; the training up to "
                f"step {trainer.version} is saved in {folder}"
            )
        if sources := trainer.sources():
            counts = {name: attrs.asdict(each) for name, each in sources.items()}
            note_ledger(trainer.plan.folder, trainer.version, counts)
        available = _available(metrics)
        if self._bar is not None:
            self._bar.update(trainer.version, available)
        self._observers.tell("rlsdk_step_end", step=trainer.version, metrics=available)

    async def after_save(self, trainer: Trainer, folder: Path) -> None:
        """Notify plugins of a checkpoint."""
        self._observers.tell("rlsdk_checkpoint_saved", step=trainer.version, folder=folder)

    async def on_end(self, trainer: Trainer, *, failed: bool) -> None:
        """Close the trackers."""
        if self._bar is not None:
            self._bar.close()
        self._metrics.close()
        seconds = FAILED_CLOSE_SECONDS if failed else CLOSE_SECONDS
        self._fates = await asyncio.to_thread(self._observers.close_trackers, seconds)

    async def on_summary(self, trainer: Trainer, summary: dict[str, Any]) -> None:
        """Add the final status of each tracker."""
        summary["trackers"] = self._fates

    def _keep_settings(self) -> None:
        """Undo what workflows, rewards, tools and callbacks in this process changed, such as whether rlsdk logs."""
        changes = self._settings.undo()
        if not changes.keys() <= self._reported:
            self._reported |= changes.keys()
            log.warning(
                "a workflow, reward, tool or callback changes settings of the whole process: %s; they are changed back "
                "after each step",
                told(changes),
            )

    def _log(self, step: int, metrics: Mapping[str, float | None]) -> None:
        """Log metrics; unavailable ones are null in `metrics.jsonl` and are not sent to trackers."""
        self._metrics.log(step, metrics)
        self._observers.log(step, _available(metrics))


class Profiling(Callback):
    """Record the learner with torch's profiler in the steps of `profile.steps`."""

    def __init__(self, learner: LearnerGroup) -> None:
        """Create a callback."""
        self._learner = learner

    async def on_start(self, trainer: Trainer) -> None:
        """Warn of steps that the run does not take."""
        first, last = trainer.version + 1, trainer.steps
        if never := [step for step in trainer.plan.config.profile.steps if not first <= step <= last]:
            log.warning("profile.steps: this run takes the steps %d to %d, not %s", first, last, never)

    async def before_step(self, trainer: Trainer) -> None:
        """Start the profiler if the step is to be recorded."""
        section = trainer.plan.config.profile
        if trainer.version + 1 in section.steps:
            await asyncio.to_thread(self._learner.start_profile, section.ranks, details=section.details)

    async def after_step(self, trainer: Trainer, metrics: Metrics) -> None:
        """Write the traces of a recorded step."""
        section, step = trainer.plan.config.profile, trainer.version
        if step not in section.steps:
            return
        folder = trainer.plan.folder / "profiles"
        folder.mkdir(exist_ok=True)
        files = {rank: folder / f"step-{step}-learner-{rank}.json.gz" for rank in section.ranks}
        await asyncio.to_thread(self._learner.stop_profile, files)
        log.info("step %d: profile of the learner in %s", step, folder)


def named_trackers(resolve: Callable[[ComponentRef], Any], trackers: Sequence[ComponentRef]) -> dict[str, Any]:
    """Return the trackers by name for the summary; a repeated name gets a number."""
    found: dict[str, Any] = {}
    for reference in trackers:
        name = short_name(reference.name)
        taken = sum(other.rpartition(" ")[0] == name or other == name for other in found)
        found[f"{name} {taken + 1}" if taken else name] = resolve(reference)
    return found


def _available(metrics: Mapping[str, float | None]) -> dict[str, float]:
    return {name: value for name, value in metrics.items() if value is not None}


class Diagnosing(Callback):
    """Run the diagnoses after each step; findings go to the log, `alerts.jsonl` and the summary.

    They run in a thread, so that they can neither end nor delay the run.
    """

    def __init__(self) -> None:
        self._history = History()
        self._found: list[Alert] = []
        self._thread: ObserverThread | None = None
        self._diagnoses: Diagnoses

    async def on_start(self, trainer: Trainer) -> None:
        """Create the alerts file; a resumed run rebuilds its history from its metrics."""
        plan = trainer.plan
        self._diagnoses = Diagnoses({short_name(each.name): plan.plugins.resolve(each) for each in plan.diagnoses})
        if trainer.version:
            lines = [line for line in read_metrics(plan.folder) if line["step"] <= trainer.version]
            self._history = History.of(lines)
        self._thread = ObserverThread("diagnoses")
        self._thread.submit("beginning", partial(begin_alerts, plan.folder, trainer.version))

    async def before_training(self, trainer: Trainer, metrics: Metrics) -> None:
        """Record the evaluation before the first step."""
        self._history = self._history.then(trainer.version, metrics)

    async def after_step(self, trainer: Trainer, metrics: Metrics) -> None:
        """Start the diagnoses without waiting for them."""
        self._history = self._history.then(trainer.version, metrics)
        if self._thread is not None:
            look = partial(self._look, trainer.plan.folder, self._history)
            self._thread.submit(f"diagnoses of step {trainer.version}", look)

    async def on_end(self, trainer: Trainer, *, failed: bool) -> None:
        """Wait for the last diagnoses."""
        thread, self._thread = self._thread, None
        if thread is not None:
            fate = await asyncio.to_thread(thread.close, FAILED_CLOSE_SECONDS if failed else CLOSE_SECONDS)
            if fate != "ok":
                log.warning("diagnoses: %s", fate)

    async def on_summary(self, trainer: Trainer, summary: dict[str, Any]) -> None:
        """Add the findings to the warnings."""
        summary["warnings"] += [str(alert) for alert in self._found if alert.level != "info"]

    def _look(self, folder: Path, history: History) -> None:
        alerts = self._diagnoses.look(history)
        for alert in alerts:
            log.log(LEVELS.get(alert.level, logging.WARNING), "%s", alert)
        self._found += alerts
        if alerts:
            append_alerts(folder, alerts)


class ShowSamples(Callback):
    """Print a few rollouts after each step, one line each: prompt, response, reward."""

    def __init__(self, console: Console, count: int) -> None:
        """Create a callback that prints `count` rollouts per step, each from another group, spread over the batch."""
        self._console, self._count = console, count

    async def after_step(self, trainer: Trainer, metrics: Metrics) -> None:
        """Print rollouts of the groups that this step settled."""
        entries = [entry for entry in trainer.closed if entry.step == trainer.version and entry.group.rollouts]
        for line in sample_lines(entries, self._count):
            self._console.print(line, no_wrap=True, overflow="ellipsis", crop=True)


def sample_lines(entries: Sequence[Entry], count: int) -> list[Text]:
    """Return a line for the first rollout of each of `count` groups, or of all if there are fewer."""
    lines = []
    for i in np.linspace(0, len(entries), min(count, len(entries)), endpoint=False, dtype=int):
        rollout, score = entries[i].group.rollouts[0], entries[i].group.scores[0]
        line = Text("  ")
        line.append(f"reward {score.value:.3f}  " if score.valid else "not scored  ", style="bold")
        prompt, response = exchange(rollout)
        line.append(visible(prompt))
        line.append(" -> ", style="dim")
        line.append(visible(response))
        lines.append(line)
    return lines
