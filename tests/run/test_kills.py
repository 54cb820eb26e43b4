"""Runs that are killed, interrupted and resumed lose nothing and leave nothing behind."""

from __future__ import annotations

import os
import random
import re
import signal
import time
from typing import Any

import pytest

from tests.run.conftest import alive, descendants, title_of, wait_for

pytestmark = [pytest.mark.stack, pytest.mark.slow]
LONGER = ("steps=12", "checkpoint.every=3", "eval.every=4")
LIGHT = "engine=transformers"  # where the engine is not what is looked at: it starts in half the time


def step_of(runner: Any) -> int:
    path = runner.path() / "metrics.jsonl"
    return path.read_text().count("\n") - 1 if path.is_file() else -1


def test_killed_at_a_random_step_and_resumed_equals_one_left_alone(runner: Any) -> None:
    runner.train(*LONGER, "name=alone")
    at = random.randint(1, 10)
    process = runner.start(*LONGER)
    wait_for(lambda: step_of(runner) >= at, 120, process)
    family = descendants(process.pid)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    end = time.monotonic() + 30
    while alive(family) and time.monotonic() < end:
        time.sleep(0.5)
    assert not alive(family), f"killed at step {at}, 30 s later these still run"
    runner.train(*LONGER, "--resume")
    assert runner.metrics() == runner.metrics("alone"), f"killed at step {at}"


def test_killed_while_a_checkpoint_is_written_resumes_from_the_one_before(runner: Any) -> None:
    process = runner.start(*LONGER, LIGHT)
    folder = runner.path() / "checkpoints"
    wait_for(lambda: (folder / "step-3").exists() and list(folder.glob(".step-*.partial")), 120, process)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    assert list(folder.glob(".step-*.partial")), "it was renamed before the signal came"
    runner.train(*LONGER, LIGHT, "--resume")
    assert [line["step"] for line in runner.metrics()] == list(range(13))


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_ctrl_c_and_sigterm_save_and_end_cleanly(runner: Any, number: signal.Signals) -> None:
    process = runner.start("steps=1000", *([] if number == signal.SIGINT else [LIGHT]))
    wait_for(lambda: step_of(runner) >= 2, 120, process)
    if number == signal.SIGTERM:
        os.kill(process.pid, signal.SIGUSR1)
        wait_for(lambda: list((runner.path() / "checkpoints").glob("step-*")), 60, process)
        saved = step_of(runner)
        wait_for(lambda: step_of(runner) > saved + 1, 60, process)  # it goes on
    family = descendants(process.pid)
    if number == signal.SIGINT:
        os.killpg(process.pid, number)  # what a terminal does: to every process of the group
    else:
        os.kill(process.pid, number)  # what Kubernetes does
    process.wait(60)
    assert process.returncode == 130
    done = runner.summary()["steps"]
    assert runner.summary()["status"] == "interrupted"
    assert (runner.path() / "checkpoints" / f"step-{done}" / "export" / "config.json").is_file()
    time.sleep(2)
    assert not alive(family)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("until", ["gcs_server", "EngineActor"])
def test_a_run_that_is_interrupted_while_it_starts_says_so_and_leaves_no_process(
    runner: Any, number: signal.Signals, until: str
) -> None:
    process = runner.start(LIGHT)

    def begun() -> bool:
        return any(until in title_of(p) for p in descendants(process.pid))

    wait_for(begun, 120, process)
    family = descendants(process.pid)
    os.kill(process.pid, number)
    assert process.wait(60) == 130
    assert "interrupted" in runner.console() and "Traceback" not in runner.console()
    assert "SIGTERM received" not in runner.console()  # of Ray's handler, which aborts the process three seconds later
    wait_for(lambda: not alive(family), 60)


def test_a_killed_learner_rank_fails_the_run_and_a_killed_engine_does_not(runner: Any) -> None:
    ahead = ("steps=40", "checkpoint.every=2", "eval.before=false", "rollout.max_staleness=1")
    both = (*ahead, "eval.after=false", LIGHT)
    process = runner.start(*both)
    wait_for(lambda: step_of(runner) >= 3, 120, process)
    kill_one(process.pid, "LearnerActor")
    process.wait(60)
    assert process.returncode == 1
    assert re.search(r"learner rank \d failed in [^;]*its process died", " ".join(runner.console().split()))

    process = runner.start(*both, "--resume")
    wait_for(lambda: step_of(runner) >= 4, 120, process)
    kill_one(process.pid, "EngineActor")
    process.wait(120)
    assert process.returncode == 0, runner.console()
    metrics, summary = runner.metrics(), runner.summary()
    assert [line["step"] for line in metrics] == list(range(1, 41))
    assert all(line["canary/gap"] < 1e-3 for line in metrics) and metrics[-1]["engines/alive"] == 1
    assert summary["engines"]["lost"] == metrics[-1]["engines/lost"] == 1
    assert "engine 0: it crashed, or something killed it" in summary["engines"]["reasons"][0]
    tasks = summary["tasks"]
    assert tasks["trained"] + tasks["filtered"] + tasks["failed"] == 40 * 4
    assert tasks["issued"] == 40 * 4 + tasks["returned"]


def kill_one(driver: int, kind: str) -> None:
    """End an actor of a class as the kernel does, the last that was started."""
    victims = [p for p in descendants(driver) if any(kind in part for part in p.cmdline())]
    assert victims
    max(victims, key=lambda p: p.create_time()).kill()
