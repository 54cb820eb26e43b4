"""Execute a sweep's runs in separate processes, and continue where an earlier sweep stopped."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import FrameType

import attrs

from rlsdk.config import Plan
from rlsdk.runlog.folder import process_in
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
