"""Execute the runs of a sweep in separate processes, and rank their results by combination of settings."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import attrs

from rlsdk.config import Plan
from rlsdk.errors import ConfigError, RunError
from rlsdk.options import did_you_mean
from rlsdk.plurals import counted
from rlsdk.reporting.estimates import Estimate, mean
from rlsdk.runlog.folder import process_in, replace_text
from rlsdk.sweeps.runs import SweepRun

POLL_SECONDS = 0.2
INTERRUPTED = 130
REFUSED = 2
"""Exit status of a run whose configuration has a fault, or whose folder another process has locked."""
ENDS = {0: "finished", INTERRUPTED: "interrupted", -signal.SIGINT: "interrupted"}
"""Exit status -> its name; a process that is just starting or ending is killed by SIGINT."""


@attrs.define
class RunOutcome:
    """Result of one run of a sweep.

    Attributes:
        run: The run.
        status: Exit status of its process; 0 also for a run that an earlier sweep finished.
        seconds: Time that it took this time.
        kept: True if an earlier sweep finished it.
        process: Id of a process that trains the run and was not started by this sweep; empty if there is none.
    """

    run: SweepRun
    status: int
    seconds: float = 0.0
    kept: bool = False
    process: str = ""


Notify = Callable[[str, RunOutcome], None]
"""Called with "waits", "begins", "continues", "finished", "kept", "interrupted" or "failed", and the run."""


class Interrupted(Exception):
    """The sweep was interrupted; runs in progress are saved."""


def train_all(
    runs: Sequence[SweepRun], plans: Mapping[str, Plan], notify: Notify, *, parallel: int = 1
) -> list[RunOutcome]:
    """Train all runs that have not been trained, and return the outcomes in order.

    The processes of a sweep that was killed continue. Their runs are waited for, as if this sweep had started them.

    Raises:
        Interrupted: Ctrl-C, SIGTERM or SIGHUP; the processes have finished their step and saved.
    """
    queue = _Queue(list(runs), plans, notify)
    passed_on = 0
    with _asked_to_end() as asked:
        while queue.open:
            if asked:
                queue.waiting.clear()
                queue.elsewhere.clear()
            queue.start(parallel)
            while passed_on < len(asked):  # the first signal ends a run after its step, the second one immediately
                passed_on += 1
                for _, process, _ in queue.working.values():
                    process.send_signal(signal.SIGINT)
            queue.collect()
            if queue.working or queue.elsewhere:
                time.sleep(POLL_SECONDS)
    if asked:
        raise Interrupted
    return [queue.ended[run.name] for run in runs]


@attrs.define
class _Queue:
    """The runs of a sweep, from those that wait to those that have ended.

    Attributes:
        waiting: Runs to start, in order.
        plans: Run name -> plan.
        notify: Called when a run starts and ends.
        working: Run name -> outcome so far, process and start time.
        elsewhere: Run name -> outcome so far, of runs in processes that this sweep did not start.
        ended: Run name -> outcome.
    """

    waiting: list[SweepRun]
    plans: Mapping[str, Plan]
    notify: Notify
    working: dict[str, tuple[RunOutcome, subprocess.Popen[bytes], float]] = attrs.field(factory=dict)
    elsewhere: dict[str, RunOutcome] = attrs.field(factory=dict)
    ended: dict[str, RunOutcome] = attrs.field(factory=dict)

    @property
    def open(self) -> bool:
        """True until all runs have ended."""
        return bool(self.waiting or self.working or self.elsewhere)

    def start(self, parallel: int) -> None:
        """Start waiting runs, up to the maximum number at once."""
        while self.waiting and len(self.working) + len(self.elsewhere) < parallel:
            run = self.waiting.pop(0)
            outcome = RunOutcome(run, 0, process=process_in(run.path))
            if outcome.process:
                self.elsewhere[run.name] = outcome
                self.notify("waits", outcome)
            elif run.finished(self.plans[run.name]):
                outcome.kept = True
                self.ended[run.name] = outcome
                self.notify("kept", outcome)
            else:
                self.notify("continues" if run.begun else "begins", outcome)
                self.working[run.name] = (outcome, _started(run), time.monotonic())

    def collect(self) -> None:
        """Take the runs whose processes have ended; those in processes of another sweep are started again or kept."""
        for name, (outcome, process, began) in list(self.working.items()):
            if process.poll() is None:
                continue
            del self.working[name]
            if process.returncode == REFUSED and process_in(outcome.run.path):  # the other process was faster
                self.waiting.insert(0, outcome.run)
                continue
            outcome.status, outcome.seconds = process.returncode, time.monotonic() - began
            self.ended[name] = outcome
            self.notify(ENDS.get(outcome.status, "failed"), outcome)
        for name, outcome in list(self.elsewhere.items()):
            if not process_in(outcome.run.path):
                del self.elsewhere[name]
                self.waiting.insert(0, outcome.run)


def _started(run: SweepRun) -> subprocess.Popen[bytes]:
    run.log.parent.mkdir(parents=True, exist_ok=True)
    plugins = [argument for file in run.plugins for argument in ("--plugin", file)]
    resume = ["--resume"] if run.begun else []
    command = [sys.executable, "-m", "rlsdk.cli", "train", str(run.config), *run.overrides, *plugins, *resume]
    with run.log.open("ab") as log:
        # A separate session: Ctrl-C in the terminal reaches only this process, which passes it on.
        return subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
        )


@contextmanager
def _asked_to_end() -> Iterator[list[int]]:
    """Collect termination signals while the block runs."""
    asked: list[int] = []

    def ask(number: int, _: FrameType | None) -> None:
        if number != signal.SIGHUP or not asked:  # when a terminal closes, both the kernel and the shell send it
            asked.append(number)

    numbers = [signal.SIGINT, signal.SIGTERM]
    if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:  # under `nohup`, it stays ignored
        numbers.append(signal.SIGHUP)
    before = {number: signal.signal(number, ask) for number in numbers}
    try:
        yield asked
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


EVALUATED = "eval/sampled"
"""Metric for runs with held-out tasks: accuracy of the sampled answers."""
TRAINED = "reward/mean"
"""Metric for runs without held-out tasks."""
FILE = "sweep.json"


@attrs.frozen
class ResultRow:
    """A combination of settings.

    Attributes:
        group: Settings: key -> value.
        values: Seed -> value of the metric; runs without a value are omitted.
        runs: Names of the runs.
        metric: Name of the metric.
    """

    group: Mapping[str, str]
    values: Mapping[int, float]
    runs: tuple[str, ...]
    metric: str

    @property
    def estimate(self) -> Estimate | None:
        """Mean over seeds; None if there is no value."""
        return mean([*self.values.values()], self.metric) if self.values else None


@attrs.frozen
class Failure:
    """A failed run: its name, the reason, and the path of its log."""

    run: str
    reason: str
    log: Path

    def as_json(self) -> dict[str, str]:
        """Return plain JSON."""
        return {"run": self.run, "reason": self.reason, "log": str(self.log)}


def default_metric(plans: Iterable[Plan]) -> str:
    """Return the metric for comparing runs: held-out accuracy, if all of them evaluate held-out tasks."""
    sections = [plan.config.eval if plan.tasks_eval else None for plan in plans]
    return EVALUATED if all(section and (section.every or section.after) for section in sections) else TRAINED


def check_metric(plans: Mapping[str, Plan], metric: str) -> None:
    """Reject a metric of evaluations, before anything is trained, if some runs will not evaluate.

    Raises:
        ConfigError: Names the first of these runs.
    """
    if not metric.startswith("eval/"):
        return
    sections = {name: plan.config.eval for name, plan in plans.items() if plan.tasks_eval}
    evaluated = {name for name, each in sections.items() if each.every or each.before or each.after}
    silent = [name for name in plans if name not in evaluated]
    if silent:
        raise ConfigError(
            [
                f"--metric: {metric} is measured by evaluations, and {len(silent)} of {counted(len(plans), 'run')} "
                f"have none, such as {silent[0]}: give tasks.eval and eval.after, or another metric, as in "
                f"--metric {TRAINED}"
            ]
        )


def rows_of(outcomes: Sequence[RunOutcome], metric: str, *, minimize: bool = False) -> list[ResultRow]:
    """Collect the metric of each combination, best first, those without a value last."""
    groups: dict[tuple[tuple[str, str], ...], list[RunOutcome]] = {}
    for outcome in outcomes:
        groups.setdefault(tuple(outcome.run.group.items()), []).append(outcome)
    rows = []
    for group, some in groups.items():
        values = {each.run.seed: each.run.result(metric) for each in some if each.status == 0}
        found = {seed: value for seed, value in values.items() if value is not None}
        rows.append(ResultRow(dict(group), found, tuple(each.run.name for each in some), metric))
    sign = 1 if minimize else -1

    def rank(row: ResultRow) -> tuple[bool, float]:
        return row.estimate is None, sign * row.estimate.value if row.estimate else 0.0

    return sorted(rows, key=rank)


def require_metric(outcomes: Sequence[RunOutcome], metric: str) -> None:
    """Reject a metric that no finished run has, or that is finite at the end of none.

    Raises:
        RunError: No run has a value of the metric; lists the available ones.
    """
    done = [outcome.run for outcome in outcomes if outcome.status == 0]
    if not done or any(run.result(metric) is not None for run in done):
        return
    there = sorted({name for run in done for name in run.metrics()})
    if metric in there:
        raise RunError(f"--metric: {metric!r} is not finite at the end of any run")
    raise RunError(f"--metric: {_missing('no run has', metric, there)}; available: {', '.join(there)}")


def missing_metric(run: SweepRun, metric: str) -> str:
    """Return a warning if a finished run has no such metric, which may be misspelt; empty if it has."""
    there = run.metrics()
    return "" if metric in there else f"--metric: {_missing('this run does not have', metric, there)}"


def _missing(what: str, metric: str, there: Iterable[str]) -> str:
    return f"{what} {metric!r}{did_you_mean(metric, there, ', ')}"


def failures_of(outcomes: Sequence[RunOutcome]) -> list[Failure]:
    """Return the failed runs with their reasons."""
    return [Failure(each.run.name, each.run.failure(each.status), each.run.log) for each in outcomes if each.status]


def as_json(folder: Path, metric: str, rows: Sequence[ResultRow], failures: Sequence[Failure]) -> dict[str, Any]:
    """Return the results as plain values."""
    return {
        "folder": str(folder),
        "metric": metric,
        "rows": [
            {
                "settings": dict(row.group),
                **(estimate.as_json() if (estimate := row.estimate) else dict.fromkeys(("mean", "low", "high"))),
                "values": {str(seed): value for seed, value in row.values.items()},
                "runs": list(row.runs),
            }
            for row in rows
        ],
        "failed": [each.as_json() for each in failures],
    }


def write(folder: Path, results: Mapping[str, Any]) -> Path:
    """Write results as `sweep.json` into the sweep's folder."""
    file = folder / FILE
    replace_text(file, json.dumps(results, indent=2))
    return file
