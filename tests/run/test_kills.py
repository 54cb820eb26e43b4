"""Runs that are killed, interrupted and resumed: nothing is lost, nothing is left."""

from __future__ import annotations

import os
import random
import signal
import time
from typing import Any

import pytest

from tests.run.conftest import alive, descendants, wait_for

pytestmark = [pytest.mark.stack, pytest.mark.slow]
LONGER = ("steps=12", "checkpoint.every=3", "eval.every=4")


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
    process = runner.start(*LONGER)
    folder = runner.path() / "checkpoints"
    wait_for(lambda: (folder / "step-3").exists() and list(folder.glob(".step-*.partial")), 120, process)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    assert list(folder.glob(".step-*.partial")), "it was renamed before the signal came"
    runner.train(*LONGER, "--resume")
    assert [line["step"] for line in runner.metrics()] == list(range(13))


def test_ctrl_c_saves_and_ends_cleanly(runner: Any) -> None:
    process = runner.start("steps=1000")
    wait_for(lambda: step_of(runner) >= 2, 120, process)
    family = descendants(process.pid)
    os.killpg(process.pid, signal.SIGINT)  # what a terminal does: to every process of the group
    process.wait(60)
    assert process.returncode == 130
    done = runner.summary()["steps"]
    assert runner.summary()["status"] == "interrupted"
    assert (runner.path() / "checkpoints" / f"step-{done}" / "export" / "config.json").is_file()
    time.sleep(2)
    assert not alive(family)


@pytest.mark.parametrize("actor", ["EngineActor", "LearnerActor"])
def test_a_killed_actor_fails_the_run_and_is_named(runner: Any, actor: str) -> None:
    process = runner.start("steps=1000")
    wait_for(lambda: step_of(runner) >= 2, 120, process)
    victims = [p for p in descendants(process.pid) if any(actor in part for part in p.cmdline())]
    assert victims
    victims[0].kill()
    process.wait(60)
    assert process.returncode == 1
    assert {"EngineActor": "engine", "LearnerActor": "learner"}[actor] in runner.console()
