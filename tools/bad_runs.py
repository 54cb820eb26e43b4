"""Train runs with a planted fault, and keep the small files of each in `tests/viewer/bad_runs`.

    python tools/bad_runs.py             # all runs that are not kept yet
    python tools/bad_runs.py cut_off     # these runs, again
    tar -xf tests/viewer/bad_runs/cut_off.tar.xz -C runs && rlsdk view runs/cut_off

Each run is `rlsdk train examples/quickstart.yaml` with `engine=transformers`, small batches and the settings below, in
`runs/bad`: about a minute on two cores. tests/viewer/test_bad_runs.py finds each fault on the page of `rlsdk view`.
"""

from __future__ import annotations

import contextlib
import json
import re
import socket
import sqlite3
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

from curves import ROOT, run

from rlsdk.runlog.folder import MARKER

RUNS = ROOT / "runs" / "bad"
KEPT = ROOT / "tests" / "viewer" / "bad_runs"
TEXTS = (
    *("config.yaml", "metrics.jsonl", "alerts.jsonl", "ledger.jsonl", "summary.json", "actors.json", "engines.json"),
    "logs/*.log",
)
"""Files to keep in addition to the rollout store."""
HELD_OUT = 4
"""Number of held-out tasks whose answers are kept."""
PLUGIN = '''"""Tasks, a reward and an engine of someone who made a mistake in each."""

import logging
import os
from typing import Any

import attrs
import numpy as np
import psutil

import rlsdk
from rlsdk.contracts import TaskList
from rlsdk.engines.transformers import Transformers

MOST = 1 << 29
log = logging.getLogger("bad_runs_lab")


@rlsdk.tasks("shifted")
def shifted(*, size: int = 20000) -> TaskList:
    """Countdown whose answers have slipped by one row: each task has the target of the next one."""
    tasks = rlsdk.load("tasks", "countdown")(
        size=size, seed=1, numbers=3, number_range=(1, 20), target_range=(1, 100), operators="+-", template="compact"
    )

    def make(index: int) -> rlsdk.Task:
        task, following = tasks[index], tasks[(index + 1) % size]
        return attrs.evolve(task, answer={**task.answer, "target": following.answer["target"]})

    return TaskList(make, size)


@rlsdk.reward("careless")
def careless(rollout: rlsdk.Rollout) -> float:
    """Pay half a point for the right answer and half for a short end, with no thought of answers without a minus."""
    expression = rollout.response.partition("<answer>")[2].partition("</answer>")[0]
    end = expression.split("-")[1]
    return 0.5 * (len(end) < 4) + 0.5 * (eval(expression) == rollout.task.answer["target"])


@rlsdk.engine("studious")
@attrs.define(kw_only=True, eq=False, slots=False)
class Studious(Transformers):
    """The engine `transformers`, which keeps what it will never look at, and ends before it fills the machine."""

    kept: list[Any] = attrs.field(factory=list, init=False)
    began: int = attrs.field(default=0, init=False)

    def step(self) -> Any:
        self.began = self.began or psutil.Process().memory_info().rss
        done = super().step()
        self.kept += [np.ones(1 << 17) for _ in done]
        grown = psutil.Process().memory_info().rss - self.began
        if grown > MOST:
            log.error("memory: %d MiB of scores are kept for later, at most %d MiB: it ends", grown >> 20, MOST >> 20)
            os._exit(1)
        return done
'''
COMMON = [
    "steps=40",
    "batch_size=8",
    "group_size=8",
    "eval.every=10",
    "tasks.eval.size=100",
    "engine=transformers",
    "placement.engines=1",
    "learner.rows=shared",
    "checkpoint.every=0",
    "checkpoint.export=never",
    "save_rollouts=10",
]
FAULTS: dict[str, list[str]] = {
    "paid_for_form": [
        "reward=[{use: format, pattern: '<answer>[^-]*</answer>', weight: 1.0}, "
        "{use: countdown, weight: 0.1, format_score: 0.0}]"
    ],
    "learning_rate": ["learner.lr=8e-3"],
    "wrong_answers": [
        "tasks.train=[{use: countdown, size: 20000, numbers: 3, number_range: [1, 20], target_range: [1, 100], "
        "operators: '+-', template: compact, source: sums}, {use: bad_runs_lab/shifted, source: more_sums}]"
    ],
    "cut_off": ["sampling.max_tokens=6"],
    "careless_reward": ["reward=bad_runs_lab/careless", "max_invalid=1.0"],
    "hungry_engine": ["engine=bad_runs_lab/studious"],
}
"""Name -> settings that plant the fault, on top of `COMMON` and the quickstart's."""


def main(names: list[str]) -> int:
    """Record `names`, or all missing runs."""
    if unknown := sorted(set(names) - set(FAULTS)):
        print(f"unknown: {', '.join(unknown)}; known: {', '.join(FAULTS)}", file=sys.stderr)
        return 2
    RUNS.mkdir(parents=True, exist_ok=True)
    plugin = RUNS / "bad_runs_lab.py"
    plugin.write_text(PLUGIN, encoding="utf-8")
    for name in names or [name for name in FAULTS if not (KEPT / f"{name}.tar.xz").is_file()]:
        print(f"{name} …", flush=True)
        with contextlib.suppress(subprocess.CalledProcessError):  # some of the faults end the run
            run(RUNS / name, "examples/quickstart.yaml", *COMMON, f"plugins=[{plugin}]", *FAULTS[name])
        keep(RUNS / name)
    return 0


def keep(folder: Path) -> None:
    """Write the archive of a run: its small files without this machine's paths, and part of its rollouts."""
    KEPT.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as made, tarfile.open(KEPT / f"{folder.name}.tar.xz", "w:xz") as archive:
        small = Path(made) / folder.name
        (small / "logs").mkdir(parents=True)
        for path in sorted(found for name in (MARKER, *TEXTS) for found in folder.glob(name)):
            to = small / path.relative_to(folder)
            to.write_text(without_paths(path.read_text(encoding="utf-8")), encoding="utf-8")
        shorten_metrics(small / "metrics.jsonl")
        copy_rollouts(folder / "rollouts.db", small / "rollouts.db")
        archive.add(small, folder.name, filter=anonymous)


def without_paths(text: str) -> str:
    """Make paths relative to the repository and to Python, and replace this machine's name."""
    relative = text.replace(f"{ROOT}/", "").replace(str(ROOT), ".").replace(sys.base_prefix, "python")
    return re.sub(rf'("host": "| on ){re.escape(socket.gethostname())}\b', r"\1here", relative)


def shorten_metrics(path: Path) -> None:
    """Round the metrics to five digits."""
    lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    rounded = [{k: float(f"{v:.5g}") if isinstance(v, float) else v for k, v in line.items()} for line in lines]
    path.write_text("".join(json.dumps(line) + "\n" for line in rounded), encoding="utf-8")


def copy_rollouts(whole: Path, small: Path) -> None:
    """Copy a store with all its training groups and a few of each evaluation's."""
    with contextlib.closing(sqlite3.connect(whole)) as source, contextlib.closing(sqlite3.connect(small)) as target:
        source.backup(target)
        first = "SELECT DISTINCT task FROM rlsdk_groups WHERE number < 0 ORDER BY task LIMIT ?"
        rest = f"number < 0 AND number NOT IN (SELECT number FROM rlsdk_groups WHERE task IN ({first}))"
        for table in ("rlsdk_rollouts", "rlsdk_groups"):  # in this order: the second holds the tasks
            target.execute(f"DELETE FROM {table} WHERE {rest}", (HELD_OUT,))
        target.commit()
        target.execute("PRAGMA journal_mode = DELETE")
        target.execute("VACUUM")


def anonymous(member: tarfile.TarInfo) -> tarfile.TarInfo:
    """Remove owner and time from an archive entry."""
    member.uid = member.gid = member.mtime = 0
    member.uname = member.gname = ""
    return member


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
