"""Training in environments, of which one raises, one hangs and one kills its worker."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.run.conftest import alive, descendants

pytestmark = [pytest.mark.stack, pytest.mark.slow]
LAB = str(Path(__file__).with_name("worlds_lab.py"))


def test_the_run_continues_the_ledger_adds_up_and_the_summary_names_them(runner: Any, tmp_path: Path) -> None:
    worlds = f"{{use: worlds_lab/moody, folder: {tmp_path}}}"
    both = f"{{one: {worlds}, two: {worlds}}}"
    source = f"{{use: environments, form: text, groups: 8, environments: {both}}}"
    arguments = (
        *("--plugin", LAB, f"tasks.train={source}", "tasks.eval=null", "reward=null", "engine=transformers"),
        *("workflow={use: environment, step_timeout: 1.0}", "model.max_length=64", "batch_size=8", "group_size=2"),
        *("max_invalid=0.5", "algorithm.filters=nonzero_variance"),
    )
    process = runner.start(*arguments, "steps=1")
    started = []
    while process.poll() is None:
        try:
            started = descendants(process.pid) or started
            process.wait(0.5)
        except Exception:
            continue
    assert process.returncode == 0, runner.console()
    first = runner.summary()
    assert sum("world is ill" in reason for reason in first["invalid"]["reasons"]) == 1
    assert sum("took longer than 1 s" in reason for reason in first["invalid"]["reasons"]) == 1
    assert "environment 'worlds_lab/moody': " in str(first["invalid"]["reasons"])
    assert first["environments"]["workers_lost"] == 1 and first["environments"]["rollouts_run_again"] >= 1
    [reason] = first["environments"]["reasons"]
    assert "environments-0" in reason and "its process died: " in reason and "environments-0.log" in reason
    assert "1 environment worker lost" in runner.console()
    assert (runner.path() / "logs" / "environments-1.log").is_file()
    self_check(first["tasks"], issued=8)
    assert first["tasks"]["failed"] == 2
    [line] = [line for line in runner.metrics() if line["step"] == 1]
    assert {"source/one/reward/mean", "source/two/workflow/turns"} <= line.keys()
    assert not alive(started)

    runner.train(*arguments, "steps=2", "--resume")
    second = runner.summary()["tasks"]
    self_check(second, issued=16)
    assert second["failed"] == 4 and all(second[name] >= first["tasks"][name] for name in second)


def self_check(tasks: dict[str, int], issued: int) -> None:
    assert tasks["issued"] == issued == tasks["trained"] + tasks["filtered"] + tasks["failed"]
