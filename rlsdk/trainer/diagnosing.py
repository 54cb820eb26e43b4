"""Run the diagnoses after each training step, in a thread, so that they can neither end nor delay the run."""

from __future__ import annotations

import asyncio
import logging
from functools import partial
from typing import TYPE_CHECKING, Any

from rlsdk.contracts import History
from rlsdk.plugins import short_name
from rlsdk.runlog.alerts import Alert, Diagnoses, append_alerts, begin_alerts
from rlsdk.runlog.metrics import read_metrics
from rlsdk.runlog.observers import CLOSE_SECONDS, ObserverThread
from rlsdk.trainer.callbacks import FAILED_CLOSE_SECONDS, Callback, Metrics

if TYPE_CHECKING:
    from pathlib import Path

    from rlsdk.trainer.trainer import Trainer

log = logging.getLogger(__name__)
LEVELS = {"info": logging.INFO, "warning": logging.WARNING, "critical": logging.ERROR}


class Diagnosing(Callback):
    """Run the diagnoses after each step; findings go to the log, `alerts.jsonl` and the summary."""

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
