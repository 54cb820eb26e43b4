"""Rollouts of whole runs: stored in the database, replayed, and restored after a kill."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections import Counter
from typing import Any

import pytest

from rlsdk.runlog.query import query
from tests.run.conftest import Runner, wait_for

pytestmark = [pytest.mark.stack, pytest.mark.slow]
SETTINGS = (
    "steps=7",
    "engine=transformers",
    "batch_size=8",
    "rollout={max_staleness: 2, buffer: stalest_first, replay: {share: 0.25, most_uses: 2}}",
    "checkpoint={every: 2, keep: 9, export: never}",
    "eval={before: false, after: false}",
)


def test_a_run_killed_while_rollouts_run_ahead_continues_with_the_waiting_groups(runner: Runner) -> None:
    process = runner.start(*SETTINGS)
    wait_for((runner.path() / "checkpoints" / "step-4").is_dir, 120, process)
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate()
    killed = query(runner.path())
    assert {4, None} <= {row["step"] for row in killed}
    runner.train(*SETTINGS, "--resume")
    log = (runner.path() / "logs" / "driver.log").read_text()
    back = [line for line in log.splitlines() if "groups that were waiting at the checkpoint" in line]
    assert len(back) == 1
    assert "restored 0 groups" not in back[0]

    rows, summary = query(runner.path()), runner.summary()
    groups: dict[int, Any] = {row["number"]: row for row in rows}
    ends = Counter(row["state"] for row in groups.values() if row["step"] is not None)
    ledger = summary["tasks"]
    assert dict(ends) == {k: v for k, v in ledger.items() if k in ("trained", "filtered", "failed") and v}
    assert ledger["issued"] == sum(ledger[k] for k in ("trained", "filtered", "failed", "returned"))
    assert {r["step"]: 0 for r in groups.values() if r["step"]} == dict.fromkeys(range(1, 8), 0)
    assert all(n == 6 for n in Counter(row["step"] for row in groups.values() if row["step"]).values())
    assert max(row["uses"] for row in groups.values()) == 2
    metrics = runner.metrics()
    reused = [line["rollouts/reused"] for line in metrics if "rollouts/reused" in line]
    assert [line["step"] for line in metrics] == list(range(1, 8))
    assert reused[0] == 0
    assert max(reused) == 8  # two groups of four
    assert max(line["staleness/max"] for line in metrics if "staleness/max" in line) in (1, 2)
    assert ledger["trained"] + ledger["filtered"] + ledger["failed"] == 7 * 6

    where = "reward is not null and step >= 2"
    command = [sys.executable, "-m", "rlsdk.cli", "rollouts", str(runner.path()), "--where", where, "--limit", "3"]
    shown = subprocess.run(command, capture_output=True, text=True, check=True)
    assert "the first 3; --limit shows more" in shown.stdout
