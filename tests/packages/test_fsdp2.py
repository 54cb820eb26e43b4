"""The learner `fsdp2`, a package unknown to the core: installed, explained, trained, killed and resumed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.stack, pytest.mark.slow]
PACKAGE = Path(__file__).resolve().parents[2] / "plugins" / "rlsdk-fsdp2"
CONFIG = PACKAGE / "countdown_nano.yaml"
SHORT = ("steps=5", "checkpoint.every=2", "batch_size=8")
CORE = "{use: deepspeed, zero_stage: 3, lr: 4.0e-4, schedule: linear, warmup_steps: 5}"


@pytest.fixture(scope="module")
def environment(install):
    """An environment with only the learner, instead of the one with two labs."""
    return install(PACKAGE)


@pytest.fixture(scope="module")
def train(environment, tmp_path_factory):
    """Start the config with overrides in a folder of its own; gives the process, or its metrics once it has ended."""
    folder = tmp_path_factory.mktemp("runs")

    def start(name: str, *overrides: str, wait: bool = True) -> Any:
        command = [sys.executable, "-m", "rlsdk.cli", "train", str(CONFIG), *SHORT, f"name={name}", f"out={folder}"]
        with (folder / f"{name}.txt").open("a") as log:
            process = subprocess.Popen([*command, *overrides], env=environment, stdout=log, stderr=log)
        if not wait:
            return process, folder / name
        assert process.wait(240) == 0, (folder / f"{name}.txt").read_text()
        return folder / name

    return start


def metrics(folder: Path) -> list[dict[str, Any]]:
    """Logged metrics of a run at each step, without times and memory."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    volatile = ("time/", "memory/", "engine/", "engines/")
    return [{k: v for k, v in line.items() if not k.startswith(volatile)} for line in lines]


@pytest.fixture(scope="module")
def alone(train):
    """The folder of a run that nothing disturbs."""
    return train("alone")


@pytest.fixture(scope="module")
def core(train):
    """The folder of the same run with the core's learner."""
    return train("core", f"learner={CORE}")


def test_it_is_listed_and_explained(rlsdk):
    (entry,) = (e for e in json.loads(rlsdk("plugins", "--json").stdout) if e["plugin"] == "fsdp2")
    assert (entry["distribution"], entry["module"], entry["broken"]) == ("rlsdk-fsdp2", "rlsdk_fsdp2", None)
    found = json.loads(rlsdk("explain", CONFIG, "--json").stdout)
    assert found["faults"] == []
    assert found["plan"]["learner"]["learner"].startswith("fsdp2/fsdp2(lr=0.0004")
    memory = {use["role"]: use["bytes"] for use in found["memory"]}
    assert memory["learner optimiser state"] == 4 * 343_680  # on each rank half of two moments in float32


def test_explain_refuses_what_it_cannot_do(rlsdk):
    def faults(*overrides: str) -> str:
        found = json.loads(rlsdk("explain", CONFIG, *overrides, "--json", status=2).stdout)
        return " ".join(f"{fault['path']}: {fault['message']}" for fault in found["faults"])

    assert "zero_stage" in faults("learner.zero_stage=3")
    assert "2 ranks of 'fsdp2/fsdp2' share rollouts, so it needs a multiple of 2; got 3" in faults(
        "learner.tensor_parallel=2", "placement.learners=3"
    )
    assert "3 ranks" in faults("learner.tensor_parallel=3", "placement.learners=3")  # of its four heads
    assert "4 ranks of 'fsdp2/fsdp2' share rollouts" in faults(
        "learner.context_parallel=2", "learner.tensor_parallel=2"
    )
    assert "context_parallel must divide" in faults("learner.context_parallel=3", "placement.learners=3")
    assert "choose one" in faults("learner.rows=shared", "learner.gradient_checkpointing=true")


def test_it_conforms(rlsdk):
    found = json.loads(rlsdk("check", "fsdp2", "--json").stdout)
    assert found["conforms"], found["findings"]


@pytest.mark.parametrize("option", [None, "tensor_parallel", "context_parallel"])
def test_losses_of_five_steps_are_those_of_the_core_learner(option, train, alone, core):
    found = metrics(alone if option is None else train(option, f"learner.{option}=2"))
    assert len(found) == 5
    for own, other in zip(found, metrics(core), strict=True):
        assert own["reward/mean"] == other["reward/mean"]
        assert own["actor/grad_norm"] > 0
        for name in ("actor/loss", "actor/grad_norm", "actor/entropy"):
            assert own[name] == pytest.approx(other[name], abs=1e-5), name


def test_the_export_is_opened_by_transformers(alone):
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    export = alone / "checkpoints" / "step-5" / "export"
    net = AutoModelForCausalLM.from_pretrained(export)
    before = AutoModelForCausalLM.from_pretrained(CONFIG.parent / "../../examples/models/countdown-nano").state_dict()
    assert all(not torch.equal(tensor, before[name]) for name, tensor in net.state_dict().items())
    tokenizer = AutoTokenizer.from_pretrained(export)
    ids = tokenizer("3,5,17>9:", return_tensors="pt").input_ids
    assert torch.isfinite(net(ids).logits).all()


def test_a_run_is_resumed_with_fewer_ranks(train, alone):
    train("fewer")
    found = metrics(train("fewer", "--resume=4", "placement.learners=1"))
    for own, other in zip(found, metrics(alone), strict=True):
        assert own["reward/mean"] == other["reward/mean"]
        assert own["actor/grad_norm"] == pytest.approx(other["actor/grad_norm"], abs=1e-4)
    assert found[4] != metrics(alone)[4], "one rank adds up in another order than two"


def test_a_run_that_was_killed_and_resumed_is_the_one_left_alone(train, alone):
    process, folder = train("killed", wait=False)
    deadline = time.monotonic() + 200
    while not (folder / "checkpoints" / "step-2").exists() and time.monotonic() < deadline:
        assert process.poll() is None
        time.sleep(0.02)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    assert not (folder / "checkpoints" / "step-5").exists(), "it had ended before the signal came"
    train("killed", "--resume")
    assert metrics(folder) == metrics(alone)
