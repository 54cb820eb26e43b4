"""Whole runs of the command line on a small model, each in a separate process."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml

TASK = {
    "use": "countdown",
    "numbers": 3,
    "number_range": [1, 20],
    "target_range": [1, 100],
    "operators": "+-",
    "template": "compact",
}
CONFIG: dict[str, Any] = {
    "name": "run",
    "model": {"max_length": 32},
    "tasks": {"train": {**TASK, "split": "train", "size": 200}, "eval": {**TASK, "split": "test", "size": 16}},
    "max_prompt_tokens": 16,
    "reward": "countdown",
    "algorithm": {"use": "grpo", "kl_coef": 0.0},
    "sampling": {"max_tokens": 10},
    "steps": 3,
    "batch_size": 4,
    "group_size": 4,
    "engine": {"use": "vllm"},
    "learner": {"use": "deepspeed", "lr": 1.0e-3},
    "placement": {"engine_threads": 1, "learner_threads": 1},
    "eval": {"limit": 8},
}
"""Three steps of GRPO: enough to see every stage work."""

NAP = """
import time
from pathlib import Path

import rlsdk

@rlsdk.workflow("nap")
async def nap(task, chat):
    while Path(__file__).with_name("blocked").exists():
        time.sleep(10_000)
    await chat.sample()
    return chat.finish()
"""
"""A workflow that blocks its thread as long as there is a file `blocked` beside it."""
RUDE = """
import rlsdk

@rlsdk.tracker("rude")
class Rude:
    def open(self, run):
        raise ConnectionError("no route to the service")

    def log(self, step, metrics): ...

    def close(self): ...

@rlsdk.hookimpl
def rlsdk_step_end(step, metrics):
    raise RuntimeError("a hook fails")
"""
"""A plugin whose every call fails."""


class Runner:
    """Starts `rlsdk train` in a folder."""

    def __init__(self, folder: Path, model: Path) -> None:
        self.folder = folder
        self.config = folder / "config.yaml"
        self._started: list[subprocess.Popen[str]] = []
        self.config.write_text(
            yaml.safe_dump({**CONFIG, "out": str(folder), "model": {"path": str(model), "max_length": 32}})
        )

    def start(self, *arguments: str, **options: Any) -> subprocess.Popen[str]:
        """Start a training and do not wait; standard error goes to `console.log`."""
        command = [sys.executable, "-m", "rlsdk.cli", "train", str(self.config), *arguments]
        # A shell starts what runs in its background with SIGINT ignored, and children inherit that.
        listening = partial(signal.signal, signal.SIGINT, signal.SIG_DFL)
        how = {"text": True, "start_new_session": True, "preexec_fn": listening, **options}
        with (self.folder / "out.log").open("a") as out, (self.folder / "console.log").open("a") as log:
            process = subprocess.Popen(command, stdout=out, stderr=log, **how)
        self._started.append(process)
        return process

    def close(self) -> None:
        """Kill the trainings that a failed test has left."""
        for process in self._started:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()

    def train(self, *arguments: str, code: int = 0, timeout: float = 240) -> None:
        """Train to the end and check the exit status."""
        process = self.start(*arguments)
        try:
            process.communicate(timeout=timeout)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            raise
        assert process.returncode == code, self.console()

    def console(self) -> str:
        """The console output."""
        return (self.folder / "console.log").read_text()

    def path(self, name: str = "run") -> Path:
        """The run's folder."""
        return self.folder / name

    def metrics(self, name: str = "run", *, times: bool = False) -> list[dict[str, Any]]:
        """The lines of `metrics.jsonl`, without times."""
        lines = [json.loads(line) for line in (self.path(name) / "metrics.jsonl").read_text().splitlines()]
        return [{k: v for k, v in line.items() if times or not k.startswith(("time/", "memory/"))} for line in lines]

    def summary(self, name: str = "run") -> dict[str, Any]:
        """`summary.json`."""
        return json.loads((self.path(name) / "summary.json").read_text())


@pytest.fixture(scope="session")
def model() -> Path:
    """The warm-started model that is shipped: right about once in three answers, so that groups differ."""
    return Path(__file__).parents[2] / "examples" / "models" / "countdown-nano"


@pytest.fixture
def runner(tmp_path: Path, model: Path) -> Iterator[Runner]:
    """Runs in a folder of their own."""
    made = Runner(tmp_path, model)
    yield made
    made.close()


@pytest.fixture(scope="session")
def finished(tmp_path_factory: pytest.TempPathFactory, model: Path) -> Runner:
    """One finished run that several tests look at, whose tracker and observer fail."""
    runner = Runner(tmp_path_factory.mktemp("finished"), model)
    lab = runner.folder / "rude_lab.py"
    lab.write_text(RUDE)
    runner.train(f"plugins=[{lab}]", "trackers=[tensorboard, rude_lab/rude]")
    return runner


def wait_for(condition: Callable[[], Any], seconds: float, process: subprocess.Popen[str] | None = None) -> None:
    """Poll until a condition holds; fails if it does not in time, or the process ends before."""
    end = time.monotonic() + seconds
    while not condition():
        assert process is None or process.poll() is None, f"the process ended with {process.returncode}"  # type: ignore[union-attr]
        assert time.monotonic() < end, f"not within {seconds} s"
        time.sleep(0.02)


def descendants(pid: int) -> list[psutil.Process]:
    """All processes below one, itself included."""
    root = psutil.Process(pid)
    return [root, *root.children(recursive=True)]


def title_of(process: psutil.Process) -> str:
    """The command line of a process, or the title that it gave itself; empty if it has ended."""
    try:
        return " ".join(process.cmdline())
    except psutil.Error:
        return ""


def alive(processes: Sequence[psutil.Process]) -> list[str]:
    """Those that still run (a zombie does not)."""
    found = []
    for process in processes:
        try:
            if process.is_running() and process.status() != psutil.STATUS_ZOMBIE:
                found.append(f"{process.pid} {' '.join(process.cmdline())[:80]}")
        except psutil.NoSuchProcess:
            continue
    return found


@pytest.fixture(scope="session")
def classifier(tmp_path_factory: pytest.TempPathFactory, model: Path) -> Path:
    """A sequence classifier with random weights, of the shape and with the tokenizer of the model."""
    from transformers import AutoConfig, AutoModelForSequenceClassification, AutoTokenizer

    folder = tmp_path_factory.mktemp("classifier")
    tokenizer = AutoTokenizer.from_pretrained(model)
    pad = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id
    config = AutoConfig.from_pretrained(model, num_labels=1, pad_token_id=pad)
    AutoModelForSequenceClassification.from_config(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder
