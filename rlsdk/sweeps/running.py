"""Execute a sweep's runs in separate processes, and continue where an earlier sweep stopped."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import attrs

from rlsdk.config import Plan
from rlsdk.sweeps.runs import SweepRun

POLL_SECONDS = 0.2
INTERRUPTED = 130
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
    """

    run: SweepRun
    status: int
    seconds: float = 0.0
    kept: bool = False


Notify = Callable[[str, RunOutcome], None]
"""Called with "begins", "continues", "finished", "kept", "interrupted" or "failed", and the run."""


class Interrupted(Exception):
    """The sweep was interrupted; runs in progress are saved."""


def train_all(
    runs: Sequence[SweepRun], plans: Mapping[str, Plan], notify: Notify, *, parallel: int = 1
) -> list[RunOutcome]:
    """Train all runs that have not been trained, and return the outcomes in order.

    Args:
        runs: The runs.
        plans: Run name -> plan.
        notify: Called when a run starts and ends.
        parallel: Maximum number of processes at once.

    Raises:
        Interrupted: Ctrl-C or SIGTERM; the processes have finished their step and saved.
    """
    waiting, working = list(runs), dict[str, tuple[RunOutcome, subprocess.Popen[bytes], float]]()
    ended: dict[str, RunOutcome] = {}
    passed_on = 0
    with _asked_to_end() as asked:
        while waiting or working:
            while waiting and len(working) < parallel and not asked:
                run = waiting.pop(0)
                if run.finished(plans[run.name]):
                    ended[run.name] = RunOutcome(run, 0, kept=True)
                    notify("kept", ended[run.name])
                    continue
                outcome = RunOutcome(run, 0)
                notify("continues" if run.begun else "begins", outcome)
                working[run.name] = (outcome, _started(run), time.monotonic())
            if asked:
                waiting.clear()
            while passed_on < len(asked):  # the first signal ends a run after its step, the second one immediately
                passed_on += 1
                for _, process, _ in working.values():
                    process.send_signal(signal.SIGINT)
            for name, (outcome, process, began) in list(working.items()):
                if process.poll() is not None:
                    del working[name]
                    outcome.status, outcome.seconds = process.returncode, time.monotonic() - began
                    ended[name] = outcome
                    notify(ENDS.get(outcome.status, "failed"), outcome)
            if working:
                time.sleep(POLL_SECONDS)
    if asked:
        raise Interrupted
    return [ended[run.name] for run in runs]


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
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    for number in before:
        signal.signal(number, lambda number, _: asked.append(number))
    try:
        yield asked
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
