"""Trainings in which a process is stopped, killed or blocked: the watchdog reports it; the run continues or ends."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from functools import partial
from typing import Any

import psutil
import pytest

from tests.run.conftest import NAP, alive, descendants, title_of, wait_for
from tests.run.test_kills import step_of

pytestmark = [pytest.mark.stack, pytest.mark.slow]
EVAL = ("eval.before=false", "eval.after=false")
HOW = ("engine=transformers", *EVAL, "watchdog.warn=1", "steps=2000", "max_empty_steps=null")
LOCK = """
import sqlite3, sys
connection = sqlite3.connect(sys.argv[1], timeout=60)
connection.execute("BEGIN IMMEDIATE")
print("up", flush=True)
sys.stdin.read()
"""
HUNG = """
import threading

import rlsdk
from rlsdk.engines.transformers import Transformers


@rlsdk.engine("hung")
class Hung(Transformers):
    def step(self):
        threading.Event().wait()
"""
SPINNING = """
from pathlib import Path

import rlsdk
from rlsdk.engines.transformers import Transformers


@rlsdk.engine("spinning")
class Spinning(Transformers):
    def step(self):
        while Path(__file__).with_name("spin").exists():
            pass
        return super().step()
"""

ENDLESS = """
import time
from pathlib import Path

import torch
import rlsdk
from rlsdk.engines.transformers import Transformers
from rlsdk.learners.deepspeed import DeepSpeedLearner


def spin(what):
    while Path(__file__).with_name(what).exists():
        pass


@rlsdk.policy_loss("endless")
def endless(x: rlsdk.LossInputs):
    if torch.distributed.get_rank() == 1:
        spin("update")
    return -x.advantages * torch.exp(x.logprobs - x.old_logprobs)


@rlsdk.learner("endless")
class Learner(DeepSpeedLearner):
    def start(self, *arguments):
        spin("learner")
        super().start(*arguments)


@rlsdk.engine("endless")
class Engine(Transformers):
    def start(self, *arguments):
        spin("engine")
        super().start(*arguments)
"""


def part(process: subprocess.Popen[str], name: str) -> psutil.Process:
    """The process of a training whose name or title contains a text."""
    found = [p for p in descendants(process.pid) if name in (p.name(), *title_of(p).split(".")[:1])]
    assert len(found) == 1, found
    return found[0]


def log_of(runner: Any) -> str:
    path = runner.path() / "logs" / "driver.log"
    return path.read_text() if path.is_file() else ""


def says(runner: Any, what: str, then: str = "") -> bool:
    return what in log_of(runner) and then in log_of(runner).split(what)[-1]


def ends(process: subprocess.Popen[str], family: list[psutil.Process]) -> None:
    assert process.wait(180) == 1
    wait_for(lambda: not alive(family), 60)


def test_stopped_parts_and_a_locked_store_are_named_and_the_run_goes_on_until_its_learner_is_silent_for_too_long(
    runner: Any,
) -> None:
    lab = runner.folder / "spin_lab.py"
    lab.write_text(SPINNING)
    spins = (f"plugins=[{lab}]", "engine=spin_lab/spinning", "watchdog.busy=8")
    process = runner.start(*HOW, *spins, "watchdog.end=12", "checkpoint.every=5")
    wait_for(lambda: step_of(runner) >= 6, 180, process)
    family = descendants(process.pid)
    raylet, learner = part(process, "raylet"), part(process, "ray::LearnerActor")
    for stopped, name in ((raylet, "Ray's raylet"), (learner, "learner rank 0")):
        os.kill(stopped.pid, signal.SIGSTOP)
        said = f"{name} (pid {stopped.pid} on "
        wait_for(partial(says, runner, said), 60, process)
        os.kill(stopped.pid, signal.SIGCONT)
        wait_for(partial(says, runner, said, "is responding again, after"), 60, process)
    with subprocess.Popen(
        [sys.executable, "-c", LOCK, str(runner.path() / "rollouts.db")], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as other:
        assert other.stdout is not None and other.stdout.readline() == b"up\n"
        wait_for(lambda: f"has been locked by process {other.pid}" in log_of(runner), 60, process)
        other.communicate()
    wait_for(lambda: "is free again" in log_of(runner), 60, process)
    engine = part(process, "ray::EngineActor")
    engine.suspend()
    wait_for(lambda: "it will be killed and replaced" in log_of(runner), 60, process)
    wait_for(lambda: "engine 0 is ready" in log_of(runner), 120, process)
    (runner.folder / "spin").touch()
    wait_for(lambda: says(runner, "engine 0 is ready", "works, but has not responded, for 8 s"), 60, process)
    (runner.folder / "spin").unlink()
    assert re.search(r'spin_lab.py", line \d+ in step', (runner.path() / "logs" / "engine-0.log").read_text())
    said = "engine died and will be replaced: step "
    wait_for(lambda: says(runner, said, "killed by the watchdog: it works, but has not responded"), 60, process)
    wait_for(lambda: says(runner, "has not responded", "engine 0 is ready"), 120, process)
    learner.suspend()
    ends(process, family)
    error = runner.summary()["error"]
    assert error.startswith(f"learner rank 0 (pid {learner.pid} on ") and "is stopped" in error
    assert "learner-0.log" in error and "watchdog.end=12 s is the limit; the checkpoint of step" in error
    assert error.split(";")[0] in log_of(runner)
    assert "the watchdog failed" not in log_of(runner)


def test_a_rank_whose_loss_never_ends_is_named_and_the_run_ends_and_can_be_resumed(runner: Any) -> None:
    lab = runner.folder / "endless_lab.py"
    lab.write_text(ENDLESS)
    loss = "algorithm={use: grpo, kl_coef: 0.0, policy_loss: endless_lab/endless}"
    how = ("engine=transformers", *EVAL, "watchdog.warn=1", f"plugins=[{lab}]", loss, "checkpoint.every=2")
    process = runner.start(*how, "steps=5000", "placement.learners=2", "watchdog.learner_busy=8")
    wait_for(lambda: step_of(runner) >= 3, 180, process)
    family = descendants(process.pid)
    (runner.folder / "update").touch()
    ends(process, family)
    (runner.folder / "update").unlink()
    summary = runner.summary()
    assert re.match(r"learner rank 1 \(pid \d+ on .*\) works, but has not responded, for 8 s", summary["error"])
    assert re.search(r"the run is in update for \d+ s; its log is .*learner-1.log", summary["error"])
    assert re.search(r"watchdog.learner_busy=8 s is the limit; the checkpoint of step \d+ is kept", summary["error"])
    assert re.search(r'endless_lab.py", line \d+ in spin', (runner.path() / "logs" / "learner-1.log").read_text())
    kept = max(int(each.name.removeprefix("step-")) for each in (runner.path() / "checkpoints").glob("step-*"))
    runner.train(*how, f"steps={kept + 2}", "placement.learners=2", "--resume")
    assert runner.metrics()[-1]["step"] == kept + 2


@pytest.mark.parametrize(("part", "limit"), [("learner", "learner_busy"), ("engine", "busy")])
def test_a_model_that_is_never_loaded_is_reported_and_ends_the_start(part: str, limit: str, runner: Any) -> None:
    lab = runner.folder / "endless_lab.py"
    lab.write_text(ENDLESS)
    (runner.folder / part).touch()
    process = runner.start(*HOW, f"plugins=[{lab}]", f"{part}=endless_lab/endless", f"watchdog.{limit}=6")
    assert process.wait(180) == 1
    error = runner.summary()["error"]
    named = "learner rank 0" if part == "learner" else "engine 0"
    assert re.search(rf"{named}.* works, but has not responded, for 6 s", error), error
    assert f"watchdog.{limit}=6 s is the limit" in error
    assert re.search(r'endless_lab.py", line \d+ in spin', (runner.path() / "logs" / f"{part}-0.log").read_text())


def test_without_its_raylet_a_run_names_it_and_without_the_gcs_it_saves_first(runner: Any) -> None:
    process = runner.start(*HOW, "name=first")
    folder = runner.path("first")
    wait_for((folder / "metrics.jsonl").is_file, 180, process)
    family, raylet = descendants(process.pid), part(process, "raylet")
    raylet.kill()
    ends(process, family)
    assert f"Ray's raylet (pid {raylet.pid} on " in runner.summary("first")["error"]
    process = runner.start(*HOW)
    wait_for(lambda: step_of(runner) >= 2, 180, process)
    family, gcs = descendants(process.pid), part(process, "gcs_server")
    gcs.kill()
    ends(process, family)
    assert f"Ray's GCS (pid {gcs.pid} on " in runner.summary()["error"]
    done = runner.metrics()[-1]["step"]
    assert f"the checkpoint of step {done} is kept" in runner.summary()["error"]
    assert (runner.path() / "checkpoints" / f"step-{done}").is_dir()


def test_a_workflow_that_blocks_its_loop_is_named_and_ends_the_run(runner: Any) -> None:
    lab = runner.folder / "nap_lab.py"
    lab.write_text(NAP)
    process = runner.start(*HOW, f"plugins=[{lab}]", "workflow=nap_lab/nap", "watchdog.end=14")
    wait_for(lambda: step_of(runner) >= 1, 180, process)
    (runner.folder / "blocked").touch()
    ends(process, [])
    assert "nap_lab.py, line 10" in log_of(runner) and "time.sleep(10_000)" in log_of(runner)
    error = runner.summary()["error"]
    assert "the event loop of users' code has been blocked for" in error and "nap_lab.py, line 10" in error


def test_an_address_without_ray_is_refused_at_once(runner: Any) -> None:
    process = runner.start(env=os.environ | {"RAY_ADDRESS": "127.0.0.1:1"})
    assert process.wait(180) == 1
    said = " ".join(runner.console().split())
    assert "'127.0.0.1:1', set by the environment variable RAY_ADDRESS, cannot be reached" in said
    assert "Traceback" not in said


@pytest.mark.parametrize(
    ("words", "silence"),
    [
        (["eval"], "uses neither CPU nor a disk and does not answer"),
        (["train", "--mode", "serve", "--port", "0"], "is stopped"),
        (["debug", "engine"], "is stopped"),
    ],
)
def test_an_engine_that_is_silent_without_a_training_is_named_and_ends_the_program(
    words: list[str], silence: str, runner: Any
) -> None:
    lab = runner.folder / "hung_lab.py"
    lab.write_text(HUNG)
    settings = ("engine=hung_lab/hung", "watchdog.warn=1", "watchdog.end=4", "--plugin", str(lab))
    command = [sys.executable, "-m", "rlsdk.cli", *words, str(runner.config), *settings]
    console = runner.folder / "console.log"
    with console.open("w") as log:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True, start_new_session=True)
    wait_for(lambda: [p for p in descendants(process.pid) if title_of(p).startswith("ray::EngineActor")], 180, process)
    family, engine = descendants(process.pid), part(process, "ray::EngineActor")
    if silence == "is stopped":
        assert process.stdout is not None and process.stdout.readline().startswith("http")
        engine.suspend()
    process.communicate(timeout=180)
    said = console.read_text().splitlines()[-1]
    assert process.returncode == 1
    assert said.startswith(f"rlsdk: engine 0 (pid {engine.pid} on ") and silence in said
    assert said.endswith("watchdog.end=4 s is the limit")
    assert "will be killed and replaced" not in console.read_text()
    wait_for(lambda: not alive(family), 60)
