"""Explorer and trainer as two programs on one Ray cluster."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import sqlalchemy as sa

from tests.run.conftest import alive, wait_for

pytestmark = [pytest.mark.stack, pytest.mark.slow]
BROKEN = """
import rlsdk
from rlsdk.engines.transformers import Transformers

@rlsdk.engine("broken")
class Broken(Transformers):
    def start(self, model, place):
        raise ZeroDivisionError("no device of that number")
"""
NO_EVAL = ("eval.before=false", "eval.after=false")


@pytest.fixture(scope="module")
def ray_address() -> Iterator[str]:
    """Of a cluster that none of the programs starts."""
    from ray.cluster_utils import Cluster

    folder = tempfile.mkdtemp(prefix="ray-", dir="/tmp")  # paths of sockets are short
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_TMPDIR", folder)  # else whoever calls `ray.init()` on this machine would find this cluster
        patch.setenv("RAY_worker_niceness", "0")  # or any other program of the machine starves the actors
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        # A program that finds a token in the home folder would refuse the calls of a cluster that was started without.
        patch.setenv("RAY_AUTH_MODE", os.environ.get("RAY_AUTH_MODE", "disabled"))
        cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 4, "include_dashboard": False})
        try:
            yield cluster.address
        finally:
            cluster.shutdown()
            shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture
def start(runner: Any, ray_address: str) -> Iterator[Any]:
    """Starts a half; processes still running at the end are killed."""
    started: list[subprocess.Popen[str]] = []

    def start(mode: str, *how: str) -> subprocess.Popen[str]:
        started.append(runner.start("--mode", mode, *how, env=os.environ | {"RAY_ADDRESS": ray_address}))
        return started[-1]

    yield start
    for process in started:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)


def steps_of(runner: Any) -> int:
    path = runner.path() / "metrics.jsonl"
    return path.read_text().count("\n") if path.is_file() else 0


def test_two_programs_train_as_one(runner: Any, finished: Any, start: Any) -> None:
    refused = start("explore", "seed=1")  # comes first, and is of another run
    wait_for(lambda: "waiting for the trainer" in runner.console(), 60, refused)
    trainer = start("train", "placement.partner_timeout=120", "log_level=debug")
    assert refused.wait(60) == 2, runner.console()
    explorer = start("explore")  # not before: the trainer asks those that wait already in any order, and one is enough
    assert (trainer.wait(150), explorer.wait(20)) == (0, 0), runner.console()
    assert "seed: the explorer has 1, the trainer no value" in " ".join(runner.console().split())
    assert "SIGTERM handler" not in runner.console()
    assert runner.metrics() == finished.metrics()
    ours, theirs = runner.summary(), finished.summary()
    assert ours["explorers_lost"] == []
    for same in ("status", "steps", "tasks", "accuracy_before", "accuracy_after", "invalid", "engines"):
        assert ours[same] == theirs[same]
    assert (runner.path() / "logs" / "explorer.log").is_file()


def test_either_half_is_killed_and_every_task_ends_once(runner: Any, start: Any) -> None:
    how = ("steps=45", "checkpoint.every=2", "engine=transformers", "rollout.max_staleness=1", *NO_EVAL)
    explorer, trainer = start("explore", *how), start("train", *how)
    wait_for(lambda: steps_of(runner) >= 3, 120, trainer)
    os.killpg(explorer.pid, signal.SIGKILL)
    wait_for(lambda: "the explorer has ended" in runner.console(), 30, trainer)
    explorer = start("explore", *how)
    before = steps_of(runner)
    wait_for(lambda: steps_of(runner) >= before + 3, 120, trainer)
    os.killpg(trainer.pid, signal.SIGKILL)
    assert explorer.wait(30) == 1
    assert f"the trainer, process {trainer.pid} on " in " ".join(runner.console().split())
    trainer, explorer = start("train", *how, "--resume"), start("explore", *how)
    wait_for(lambda: "continuing from step" in runner.console(), 120, trainer)
    before = steps_of(runner)
    wait_for(lambda: steps_of(runner) >= before + 3, 60, trainer)
    os.kill(explorer.pid, signal.SIGINT)
    assert (trainer.wait(60), explorer.wait(20)) == (130, 130), runner.console()
    summary, metrics = runner.summary(), runner.metrics()
    done = summary["steps"]
    assert [line["step"] for line in metrics] == list(range(1, done + 1))
    assert all(line["canary/gap"] < 1e-3 for line in metrics)  # the weights came over
    tasks = summary["tasks"]
    assert tasks["issued"] == tasks["trained"] + tasks["filtered"] + tasks["failed"] + tasks["returned"]
    assert tasks["issued"] - tasks["returned"] == 4 * done  # every group that was taken has ended, once
    with sa.create_engine(f"sqlite:///{runner.path() / 'rollouts.db'}").connect() as database:
        groups = database.execute(sa.text("select step, task from rlsdk_groups where step is not null")).all()
    assert Counter(group.step for group in groups) == dict.fromkeys(range(1, done + 1), 4)
    assert len({group.task for group in groups}) == 4 * done  # of the 200 in the first epoch none was drawn twice


@pytest.mark.parametrize("half, partner", [("train", "an explorer"), ("explore", "the trainer")])
def test_sigterm_ends_a_half_that_waits_for_the_other(runner: Any, start: Any, half: str, partner: str) -> None:
    waiting = start(half)
    wait_for(lambda: f"waiting for {partner}" in runner.console(), 120, waiting)
    waiting.send_signal(signal.SIGTERM)
    assert waiting.wait(60) == 130, runner.console()
    if half == "train":
        assert runner.summary()["status"] == "interrupted"


def test_ctrl_c_in_a_trainer_that_starts_interrupts_its_explorer_too(runner: Any, start: Any) -> None:
    explorer, trainer = start("explore"), start("train")
    wait_for(lambda: "the explorer is process" in runner.console(), 120, trainer)
    trainer.send_signal(signal.SIGINT)
    assert (trainer.wait(120), explorer.wait(60)) == (130, 130), runner.console()
    assert "the trainer has failed" not in runner.console()


def test_what_fails_in_the_explorer_fails_both_and_is_named_by_both(runner: Any, start: Any, tmp_path: Path) -> None:
    lab = tmp_path / "broken_lab.py"
    lab.write_text(BROKEN)
    how = (f"plugins=[{lab}]", "engine=broken_lab/broken", *NO_EVAL)
    explorer, trainer = start("explore", *how), start("train", *how)
    assert (explorer.wait(120), trainer.wait(60)) == (1, 1), runner.console()
    said = " ".join(runner.console().split())
    assert said.count("rlsdk: engine 0 did not start: ZeroDivisionError: no device of that number") == 2


def test_rollout_workers_belong_to_the_explorer_and_end_with_it(runner: Any, start: Any) -> None:
    how = ("steps=2", "engine=transformers", "rollout.workers=2", "eval.limit=4")
    explorer, trainer = start("explore", *how), start("train", *how)
    assert (trainer.wait(150), explorer.wait(20)) == (0, 0), runner.console()
    assert runner.summary()["rollout_workers"] == {"lost": 0, "reasons": []}
    assert runner.summary()["tasks"]["trained"] + runner.summary()["tasks"]["filtered"] == 8
    assert (runner.path() / "logs" / "rollout-worker-1.log").is_file()
    left = [process for process in psutil.process_iter(["cmdline"]) if "RolloutWorker" in str(process.info["cmdline"])]
    wait_for(lambda: not alive(left), 10)


def test_without_a_cluster_the_error_teaches(runner: Any) -> None:
    environment = {k: v for k, v in os.environ.items() if k != "RAY_ADDRESS"}
    process = runner.start("--mode", "train", env=environment)
    assert process.wait(60) == 2
    assert "ray start --head" in runner.console()
