"""Trainings with rollout workers: the same as in one process, and through deaths, pauses and resumes."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tests.run.conftest import NAP, alive, descendants, wait_for
from tests.run.test_environments import self_check
from tests.run.test_kills import kill_one, step_of

pytestmark = [pytest.mark.stack, pytest.mark.slow]
HERE = Path(__file__).parent
LAB, SLOW = HERE / "workers_lab.py", HERE / "slow_lab.py"
TWO, LIGHT = "rollout.workers=2", "engine=transformers"
NO_EVAL = ("eval.before=false", "eval.after=false")

BY_HAND = """
import asyncio

import rlsdk

if __name__ == "__main__":
    with rlsdk.Trainer.from_config("config.yaml", "engine=transformers", "rollout.workers=1") as trainer:
        print(asyncio.run(trainer.step())["rollouts/tokens"])
        print(trainer.evaluate().accuracy["greedy"])
        print(asyncio.run(trainer.step())["rollouts/tokens"])
        try:
            trainer.sample([[1, 2]])
        except rlsdk.RlsdkError as error:
            assert "rollout.workers is set" in str(error), error
        else:
            raise AssertionError
"""


def seen(runner: Any, name: str = "run") -> list[list[Any]]:
    """The hook's record of each rollout, in a fixed order."""
    return sorted(json.loads(line) for line in (runner.path(name) / "seen.jsonl").read_text().splitlines())


def test_rollouts_rewards_and_evaluations_equal_those_of_one_process(runner: Any) -> None:
    arguments = (f"plugins=[{LAB}]", "reward=workers_lab/touchy", "max_invalid=1.0", "sampling.seeds=request", LIGHT)
    runner.train(*arguments, "name=alone")
    runner.train(*arguments, "name=apart", TWO)
    alone, apart = seen(runner, "alone"), seen(runner, "apart")
    assert alone == apart
    assert len(apart) == 3 * 4 * 4  # each once
    assert 0 < sum(not valid for *_, valid, _, _ in apart) < len(apart)
    first, second = (runner.summary(name) for name in ("alone", "apart"))
    for name in ("accuracy_before", "accuracy_after", "invalid", "tasks", "rollout_workers"):
        assert first[name] == second[name], name
    assert "ValueError: an even answer" in str(second["invalid"]["reasons"])
    logs = runner.path("apart") / "logs"
    assert (logs / "rollout-worker-0.log").is_file() and (logs / "rollout-worker-1.log").is_file()


@pytest.mark.parametrize("in_flight", [pytest.param(True, marks=pytest.mark.long), False])
def test_a_worker_and_an_engine_are_killed_and_the_run_is_interrupted_and_resumed(runner: Any, in_flight: bool) -> None:
    ahead = f"{{max_staleness: 2, in_flight: {str(in_flight).lower()}, workers: 2}}"
    arguments = (f"plugins=[{SLOW}, {LAB}]", "engine=slow_lab/slow", f"rollout={ahead}", *NO_EVAL, "checkpoint.every=2")
    process = runner.start(*arguments, "steps=1000")
    wait_for(lambda: step_of(runner) >= 2, 120, process)
    kill_one(process.pid, "RolloutWorkerActor")
    killed = step_of(runner)
    wait_for(lambda: "rollout worker died" in runner.console(), 60, process)
    wait_for(lambda: step_of(runner) >= killed + 2, 60, process)
    kill_one(process.pid, "EngineActor")
    killed = step_of(runner)
    wait_for(lambda: step_of(runner) >= killed + 2, 120, process)
    family = descendants(process.pid)
    process.send_signal(signal.SIGINT)
    process.wait(60)
    assert process.returncode == 130, runner.console()
    wait_for(lambda: not alive(family), 10)
    first = runner.summary()
    assert first["engines"]["lost"] == 1 and first["rollout_workers"]["lost"] == 1
    assert "rollout worker" in first["rollout_workers"]["reasons"][0]
    assert first["tasks"]["returned"] > 0

    runner.train(*arguments, f"steps={first['steps'] + 3}", "--resume")
    lines = [line for line in runner.metrics() if line["step"] > 0]
    assert [line["step"] for line in lines] == list(range(1, first["steps"] + 4))
    assert all(line["canary/gap"] < 1e-3 for line in lines)
    tasks = runner.summary()["tasks"]
    assert tasks["trained"] + tasks["filtered"] + tasks["failed"] == 4 * (first["steps"] + 3)
    assert tasks["issued"] == tasks["trained"] + tasks["filtered"] + tasks["failed"] + tasks["returned"]
    rollouts = seen(runner)
    assert all(versions == sorted(versions) for *_, versions in rollouts)
    assert any(len(set(versions)) > 1 for *_, versions in rollouts)  # a sync came in the middle of an answer
    assert {status for _, _, _, status, *_ in rollouts} <= {"finished", "truncated"}
    keys = Counter((step, task, tuple(tokens)) for step, task, tokens, *_ in rollouts)
    assert sum(keys.values()) >= 4 * tasks["trained"]


def test_environments_belong_to_a_worker_and_are_replaced_there(runner: Any, tmp_path: Path) -> None:
    worlds = f"{{use: worlds_lab/moody, folder: {tmp_path}}}"
    source = f"{{use: environments, form: text, groups: 8, environments: {{one: {worlds}, two: {worlds}}}}}"
    runner.train(
        *("--plugin", str(HERE / "worlds_lab.py"), f"tasks.train={source}", "tasks.eval=null", "reward=null", LIGHT),
        *("workflow={use: environment, step_timeout: 1.0}", "model.max_length=64", "batch_size=8", "group_size=2"),
        *("max_invalid=0.5", "algorithm.filters=nonzero_variance", "steps=1", TWO),
    )
    summary = runner.summary()
    assert sum("world is ill" in reason for reason in summary["invalid"]["reasons"]) == 1
    assert sum("took longer than 1 s" in reason for reason in summary["invalid"]["reasons"]) == 1
    assert summary["environments"]["workers_lost"] == 1 and summary["environments"]["rollouts_run_again"] >= 1
    [reason] = summary["environments"]["reasons"]
    assert "environments-w" in reason and "its process died: " in reason
    self_check(summary["tasks"], issued=8)
    assert "environment worker lost" in (runner.path() / "logs" / "driver.log").read_text()


def test_an_error_in_a_worker_ends_the_run_with_its_own_text(runner: Any) -> None:
    runner.train(f"plugins=[{LAB}]", "workflow=workers_lab/refusing", LIGHT, TWO, *NO_EVAL, code=1)
    assert "the workflow cannot use" in runner.console()
    assert "RayTaskError" not in runner.console()
    assert "the workflow cannot use" in runner.summary()["error"]


def test_a_trainer_by_hand_has_workers_too(runner: Any) -> None:
    script = runner.folder / "by_hand.py"
    script.write_text(BY_HAND)
    ran = subprocess.run(
        [sys.executable, script], cwd=runner.folder, capture_output=True, text=True, timeout=240, check=False
    )
    assert ran.returncode == 0, ran.stderr[-4000:]
    first, accuracy, second = map(float, ran.stdout.splitlines())
    assert first > 0 and second > 0 and 0 <= accuracy <= 1


def test_a_worker_that_users_code_blocks_is_named_killed_and_replaced(runner: Any) -> None:
    lab, blocked = runner.folder / "nap_lab.py", runner.folder / "blocked"
    lab.write_text(NAP)
    blocked.touch()
    watchdog = ("watchdog.warn=1", "watchdog.end=4")
    process = runner.start(f"plugins=[{lab}]", "workflow=nap_lab/nap", LIGHT, "rollout.workers=1", *NO_EVAL, *watchdog)
    wait_for(lambda: "it will be killed and replaced" in runner.console(), 120, process)
    blocked.unlink()
    assert process.wait(120) == 0, runner.console()
    said = " ".join(runner.console().split())
    assert "rollout worker 0 (pid" in said
    assert runner.summary()["rollout_workers"]["lost"] == 1
    assert "nap_lab.py" in (runner.path() / "logs" / "rollout-worker-0.log").read_text()  # with its stacks
