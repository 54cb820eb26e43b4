"""Runs that resume one another through one fault after another; the state of the run is checked after each.

A run goes on from where the last one ended, so that most faults cost no start of their own.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import resource
import shutil
import signal
import sqlite3
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from itertools import groupby
from pathlib import Path
from typing import Any

import attrs
import psutil
import yaml

import rlsdk
from tests.faults.cells import Cell
from tests.faults.room import Room

LAB = Path(__file__).with_name("faults_lab.py")
MODEL = Path(__file__).parents[2] / "examples" / "models" / "countdown-nano"
BATCH = 4
LIMIT = 240.0
"""Seconds until whatever is waited for counts as hanging; a start on a loaded machine takes one of them."""
PAUSE = 4.0
"""Seconds for which a process is stopped, or a file locked, where it is set free again."""
GONE_WITHIN = 30.0
INTERRUPTED = 130
CONFIG: dict[str, Any] = {
    "name": "run",
    "plugins": [str(LAB)],
    "model": {"path": str(MODEL), "max_length": 64},
    "tasks": {
        "train": {
            "use": "environments",
            "form": "text",
            "groups": 1_000_000,
            "rounds": 1,
            "environments": {"digits": "faults_lab/digits"},
        },
        "eval": {
            "use": "environments",
            "form": "text",
            "groups": 4,
            "rounds": 1,
            "environments": {"exam": "faults_lab/exam"},
        },
    },
    "workflow": "environment",
    "max_prompt_tokens": 16,
    "reward": "faults_lab/score",
    "scoring": {"timeout": 20.0},
    "max_invalid": 0.7,
    "algorithm": {
        "use": "grpo",
        "kl_coef": 0.0,
        "policy_loss": "faults_lab/loss",
        "shaping": ["faults_lab/shaping"],
    },
    "sampling": {"max_tokens": 8},
    "steps": 3_000,  # more than any lineage does; rlsdk asks for the disk space of all of them
    "batch_size": BATCH,
    "group_size": 2,
    "engine": "faults_lab/engine",
    "learner": {"use": "faults_lab/learner", "skip_limit": 1},
    "trackers": ["faults_lab/tracker"],
    "placement": {"engine_threads": 1, "learner_threads": 1, "engine_restarts": 1000},
    "checkpoint": {"every": 2, "keep": 3},
    "eval": {"every": 3, "before": False, "after": False},
}


class FaultError(Exception):
    """A run behaved differently than required."""


@attrs.frozen
class Result:
    """How a cell ended.

    Attributes:
        cell: The cell.
        fault: What was wrong; empty where the cell ended as it must.
        said: What the run said about the fault.
        seconds: How long it took.
    """

    cell: Cell
    fault: str
    said: str
    seconds: float


def judge(cells: Iterable[Cell], folder: Path) -> Iterator[Result]:
    """Judge cells, sharing a lineage where possible; after a fault, another lineage begins.

    Args:
        cells: In any order.
        folder: Gets a folder for each lineage; those in which all was well are removed.
    """
    number = 0
    for _, group in groupby(sorted(cells, key=lambda cell: cell.lineage), key=lambda cell: cell.lineage):
        lineage: Lineage | None = None
        try:
            for cell in group:
                if lineage is None:
                    number += 1
                    lineage = Lineage(folder / f"lineage-{number}", cell)
                result = lineage.judge(cell)
                if result.fault:
                    lineage.close()
                    lineage = None
                yield result
        finally:
            if lineage is not None:
                lineage.close()
                shutil.rmtree(lineage.folder, ignore_errors=True)


class Lineage:
    """Runs in one folder, at most one at a time."""

    def __init__(self, folder: Path, first: Cell) -> None:
        self.folder, self.out, self.fault = folder, folder / "out", folder / "fault"
        self.fault.mkdir(parents=True)
        self.out.mkdir()
        (folder / "config.yaml").write_text(yaml.safe_dump({**CONFIG, "out": str(self.out)}))
        self.settings = first.settings
        self.room = Room(self.out, first.shm) if first.room else None
        self.run = self.room.seen(self.out / "run") if self.room else self.out / "run"
        self.process: subprocess.Popen[bytes] | None = None
        self._undo: list[Callable[[], object]] = []
        self._number = 0
        self._read_from = 0
        self._garbled = False

    def judge(self, cell: Cell) -> Result:
        """Cause one fault in the run, and wait until it is a step further."""
        start, said, fault = time.monotonic(), "", ""
        try:
            said = self._met(cell)
            self._books()
        except FaultError as error:
            fault = str(error)
        return Result(cell, fault, said, time.monotonic() - start)

    def close(self) -> None:
        """End whatever still runs."""
        for pid in self._left():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        if self.process is not None:
            self.process.wait()
        if self.room:
            self.room.close()

    def _met(self, cell: Cell) -> str:
        self._number += 1
        if self.process is not None and (cell.fresh or cell.when == "start"):
            self._interrupt()
        if cell.prepared:
            self._further(max(self._step(), 4))  # beyond a second checkpoint
        elif cell.when != "start":
            self._further()
        if cell.prepared:
            self._interrupt()
        self._read_from = self._console_size()
        at = self._step()
        if cell.prepared:
            self._cause(cell)
        elif cell.when != "start":
            self._tell(cell)
            if cell.when == "end":
                self._alive().send_signal(signal.SIGINT)
        else:
            if not cell.before:  # else nobody is to wait at the moment
                self._tell(cell)
            self._start(cell)
        if not cell.prepared and not cell.before:
            self._reach(cell)
        if cell.prepared or cell.end == "continued":
            if cell.when != "end":
                self._further(at)
            if cell.when == "end" or cell.said_at_end:
                self._interrupt()
        else:
            self._ended(-signal.SIGKILL if cell.end == "resumed" else 1)
        said = self._said(cell)
        self._tell(None)
        while self._undo:
            self._undo.pop()()
        self._further(at)
        if cell.before:
            self._interrupt()
        return said

    # The run

    def _start(self, cell: Cell | None = None) -> None:
        command = [
            sys.executable,
            "-m",
            "rlsdk.cli",
            "train",
            str(self.folder / "config.yaml"),
            *self.settings,
            "--resume",
        ]
        if cell and cell.before and cell.files:
            command = ["sh", "-c", f'ulimit -n {cell.files}; exec "$@"', "sh", *command]
        environment = os.environ | {"OMP_NUM_THREADS": "1", "RLSDK_FAULT": str(self.fault)}
        with (self.folder / "console.log").open("a") as log:
            self.process = subprocess.Popen(
                [*(self.room.enter if self.room else []), *command],
                env=environment,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def _alive(self) -> subprocess.Popen[bytes]:
        if self.process is None or self.process.poll() is not None:
            status = None if self.process is None else self.process.returncode
            raise FaultError(f"the run is over, with status {status}: {self._console()}")
        return self.process

    def _further(self, step: int | None = None) -> None:
        """Have a run that is beyond a step, or beyond the last one; a resumed one has done a step of its own then."""
        step = self._step() if step is None else step
        if self.process is None:
            step = max(step, self._step())
            self._start()
        self._wait(lambda: self._step() > step)

    def _interrupt(self) -> None:
        self._alive().send_signal(signal.SIGINT)
        self._ended(INTERRUPTED)

    def _ended(self, expected: int) -> None:
        """Wait until the run has ended with a status, and all that it started."""
        assert self.process is not None
        try:
            status = self.process.wait(LIMIT)
        except subprocess.TimeoutExpired:
            raise FaultError(f"it hung: no end within {LIMIT:g} s: {self._console()}") from None
        self.process = None
        if status != expected:
            raise FaultError(f"the run ended with status {status}, not {expected}: {self._console()}")
        end = time.monotonic() + GONE_WITHIN
        while left := self._left():
            if time.monotonic() > end:
                raise FaultError(f"{GONE_WITHIN:g} s after the end these still run: {[*map(_title, left)]}")
            time.sleep(0.1)

    def _left(self) -> list[int]:
        """Processes of this lineage: they inherited its variable."""
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                if process.status() != psutil.STATUS_ZOMBIE and self._ours(process):
                    found.append(process.pid)
        return found

    def _ours(self, process: psutil.Process) -> bool:
        return process.environ().get("RLSDK_FAULT") == str(self.fault)

    def _wait(self, condition: Callable[[], bool]) -> None:
        """Wait for a condition while the run runs."""
        end = time.monotonic() + LIMIT
        while not condition():
            if self.process is None or self.process.poll() is not None:
                if condition():  # it came with the end
                    return
                self._alive()
            if time.monotonic() > end:
                raise FaultError(f"it hung: nothing came within {LIMIT:g} s: {self._console()}")
            time.sleep(0.05)

    # The fault

    def _tell(self, cell: Cell | None) -> None:
        told = {**attrs.asdict(cell), "number": self._number} if cell else {}
        (self.fault / ".cell").write_text(json.dumps(told))
        (self.fault / ".cell").rename(self.fault / "cell.json")

    def _reach(self, cell: Cell) -> None:
        """Wait for the moment, and cause an external fault."""
        reached = self.fault / f"reached {self._number}"
        self._wait(reached.exists)
        if not cell.inside:
            self._cause(cell)
        self._go()

    def _go(self) -> None:
        (self.fault / f"go {self._number}").touch()

    def _cause(self, cell: Cell) -> None:
        """Cause a fault from outside."""
        checkpoints = self.run / "checkpoints"
        match cell.what:
            case "SIGKILL":
                os.kill(self._pid(cell.who), signal.SIGKILL)
            case "SIGSTOP":
                os.kill(self._pid(cell.who), signal.SIGSTOP)
            case "SIGSTOP and SIGCONT":
                pid = self._pid(cell.who)
                os.kill(pid, signal.SIGSTOP)
                self._go()
                time.sleep(PAUSE)
                os.kill(pid, signal.SIGCONT)
            case "disk full":
                self._fill()
            case "read-only folder":
                assert self.room
                self.room.read_only(self.out)
                self._undo.append(lambda: self.room and self.room.writable(self.out))
            case "few open files":
                pid = self._pid(cell.who)
                limit = len(os.listdir(f"/proc/{pid}/fd")) + cell.files
                resource.prlimit(pid, resource.RLIMIT_NOFILE, (limit, limit))
            case "full shared memory":
                assert self.room
                self._undo.append(self.room.fill(Path("/dev/shm")))
            case "locked rollouts.db":
                locked = sqlite3.connect(self.run / "rollouts.db", timeout=30)
                locked.execute("BEGIN IMMEDIATE")
                if cell.how == "for good":
                    self._undo.append(locked.close)
                    return
                self._go()
                time.sleep(PAUSE)
                locked.close()
            case "damaged rollouts.db":
                for path in self.run.glob("rollouts.db*"):
                    path.write_bytes(b"\xff" * path.stat().st_size)
            case "corrupted checkpoint":
                _damage(_newest(checkpoints), cell.how)
            case "garbled metrics.jsonl":
                self._garbled = True
                *lines, last = (self.run / "metrics.jsonl").read_text().splitlines()
                (self.run / "metrics.jsonl").write_text("\n".join([*lines[:-1], lines[-1][:20], last]) + "\n")
            case other:
                raise AssertionError(other)

    def _fill(self) -> None:
        assert self.room
        self._undo.append(self.room.fill(self.out))

    def _pid(self, who: str) -> int:
        """The process that a cell means."""
        driver = self._alive().pid
        if who == "driver":
            return driver
        if who in ("raylet", "gcs_server"):
            named = [p for p in psutil.Process(driver).children(recursive=True) if p.name() == who]
            if not named:
                raise FaultError(f"there is no {who}")
            return named[0].pid
        path, end = self.fault / f"pid {who}", time.monotonic() + 30
        while time.monotonic() < end:  # a process may be about to write its own, or just be replaced
            with contextlib.suppress(psutil.Error, OSError, ValueError):
                pid = int(path.read_text())
                if self._ours(psutil.Process(pid)):
                    return pid
            time.sleep(0.05)
        raise FaultError(f"there is no process of the {who}")

    # The judgement

    def _said(self, cell: Cell) -> str:
        """The run's message about the fault."""
        if not cell.says:
            return ""
        end = time.monotonic() + 30
        while not (found := re.search(cell.says, self._console(whole=True))):
            if self.process is None or time.monotonic() > end:
                raise FaultError(f"nothing like {cell.says!r} was said: {self._console()}")
            time.sleep(0.2)
        return found.group()

    def _console_size(self) -> int:
        path = self.folder / "console.log"
        return path.stat().st_size if path.exists() else 0

    def _console(self, *, whole: bool = False) -> str:
        """Console output since the fault, on one line."""
        text = (self.folder / "console.log").read_bytes()[self._read_from :].decode(errors="replace")
        text = " ".join(text.split())
        return text if whole else text[-1500:]

    def _lines(self) -> list[dict[str, Any]]:
        """Lines of `metrics.jsonl`, whole ones only."""
        path = self.run / "metrics.jsonl"
        text = path.read_text(errors="replace").rpartition("\n")[0] if path.is_file() else ""
        found = []
        for line in text.splitlines():
            with contextlib.suppress(ValueError):
                found.append(json.loads(line))
        return found

    def _step(self) -> int:
        """The last step that was done."""
        return max((line["step"] for line in self._lines()), default=0)

    def _books(self) -> None:
        """Check that every step was done once, and that no task was lost or trained twice."""
        steps = [line["step"] for line in self._lines()]
        if len(set(steps)) != len(steps) or steps != sorted(steps):
            raise FaultError(f"metrics.jsonl has the steps {steps}")
        if steps != list(range(1, len(steps) + 1)) and not self._garbled:
            raise FaultError(f"metrics.jsonl lacks steps: {steps}")
        if self.process is not None:
            return
        summary = self.run / "summary.json"
        if summary.is_file() and (tasks := json.loads(summary.read_text()).get("tasks")):
            ended = tasks["trained"] + tasks["filtered"] + tasks["failed"]
            if ended % BATCH or tasks["issued"] != ended + tasks["returned"]:
                raise FaultError(f"the summary's tasks do not add up: {tasks}")
        if (self.run / "rollouts.db").exists():
            self._stored()

    def _stored(self) -> None:
        copy = self.folder / "copy"
        shutil.rmtree(copy, ignore_errors=True)
        copy.mkdir()
        for path in [*self.run.glob("rollouts.db*"), *self.run.glob("*.yaml")]:
            if path.is_file():
                shutil.copy(path, copy)
        found = rlsdk.rollouts(copy)
        found = found[found["step"].notna() & found["state"].isin(["trained", "filtered", "failed"])]
        groups = {(row["number"], row["task"], int(row["step"])) for _, row in found.iterrows()}
        if twice := [task for task, count in Counter(task for _, task, _ in groups).items() if count > 1]:
            raise FaultError(f"trained twice: {twice}")
        per_step = Counter(step for *_, step in groups)
        if any(per_step[step] != BATCH for step in range(min(per_step, default=1), max(per_step, default=0) + 1)):
            raise FaultError(f"groups by step in the store: {dict(per_step)}")


def _newest(checkpoints: Path) -> Path:
    """The newest checkpoint that was not set aside as damaged."""
    return max((p for p in checkpoints.glob("step-*") if p.name[5:].isdigit()), key=lambda p: int(p.name[5:]))


def _damage(checkpoint: Path, how: str) -> None:
    files = [path for path in (checkpoint / "learner").rglob("*") if path.is_file()]
    shard = max(files, key=lambda path: path.stat().st_size)
    state = checkpoint / "state.json"
    match how:
        case "truncated shard":
            os.truncate(shard, shard.stat().st_size // 2)
        case "flipped byte":
            data = bytearray(shard.read_bytes())
            data[len(data) // 2] ^= 0xFF
            shard.write_bytes(data)
        case "missing shard":
            shard.unlink()
        case "empty state":
            state.write_text("")
        case "state without keys":
            state.write_text("{}")
        case other:
            raise AssertionError(other)


def _title(pid: int) -> str:
    with contextlib.suppress(psutil.Error):
        return f"{pid} {' '.join(psutil.Process(pid).cmdline())[:80]}"
    return f"{pid} (gone)"
