"""The same config with another algorithm, engine or ZeRO stage."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.stack, pytest.mark.slow]


TRANSFERS_FOR_GPUS = """
import rlsdk
import torch
from rlsdk.transfers.broadcast import Nccl
from rlsdk.transfers.cuda_ipc import CudaIpc

@rlsdk.weight_transfer("nccl_on_cpu")
class NcclOnCPU(Nccl):
    'The transfer for GPUs with another backend and device, and all else as it is.'
    backend, device = "gloo", "cpu"

@rlsdk.weight_transfer("ipc_on_cpu")
class IpcOnCPU(CudaIpc):
    'The transfer for shared GPUs with another device, and all else as it is.'
    device = "cpu"

    def _gpu(self):
        torch.multiprocessing.set_sharing_strategy("file_system")  # handles that any process can open, like a GPU's
        return "this machine"
"""


@pytest.mark.parametrize("transfer", ["gloo", "transfer_lab/nccl_on_cpu", "transfer_lab/ipc_on_cpu"])
def test_weights_that_engines_receive_in_a_stream_train_the_same(runner: Any, finished: Any, transfer: str) -> None:
    lab = runner.folder / "transfer_lab.py"
    lab.write_text(TRANSFERS_FOR_GPUS)
    runner.train(f"plugins=[{lab}]", f"rollout.weight_transfer={{use: {transfer}, bucket_mib: 1}}")
    assert "object store" not in runner.console()  # which sends them instead if a stream fails
    names = ("reward/mean", "actor/loss", "actor/grad_norm", "canary/gap")
    assert [[line[name] for name in names] for line in runner.metrics()[1:]] == [
        [line[name] for name in names] for line in finished.metrics()[1:]
    ]


TURNS = """
import rlsdk
from rlsdk.engines.group import EngineGroup
from rlsdk.learners.group import LearnerGroup

slept = []

def counted(group, who):
    sleep = group.sleep
    group.sleep = lambda self: (slept.append(who), sleep(self))[1]

if __name__ == "__main__":
    counted(EngineGroup, "engines")
    counted(LearnerGroup, "learner")
    with rlsdk.Trainer.from_config("config.yaml") as trainer:
        trainer.rollouts._rollouts.engines.shared = True  # as on a GPU
        trainer.train()
    print(*slept)
"""


def test_engines_and_learner_that_take_turns_as_on_a_shared_gpu_train_the_same(runner: Any, finished: Any) -> None:
    (runner.folder / "turns.py").write_text(TURNS)
    ran = subprocess.run(
        [sys.executable, "turns.py"], cwd=runner.folder, capture_output=True, text=True, timeout=240, check=False
    )
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.split()[-9:] == ["engines", "learner", "learner"] * 3  # before and after the weights are sent
    names = ("reward/mean", "actor/loss", "actor/grad_norm", "canary/gap")
    assert [[line[name] for name in names] for line in runner.metrics()[1:]] == [
        [line[name] for name in names] for line in finished.metrics()[1:]
    ]


@pytest.mark.parametrize("transfer", ["gloo", "transfer_lab/ipc_on_cpu"])
def test_ranks_that_share_all_learn_the_same_and_gather_a_stream_layer_by_layer(
    runner: Any, finished: Any, transfer: str
) -> None:
    """ZeRO's stage 3; that the gradients of all stages are the same, tests/learners sees."""
    lab = runner.folder / "transfer_lab.py"
    lab.write_text(TRANSFERS_FOR_GPUS)
    settings = (f"plugins=[{lab}]", f"rollout.weight_transfer={transfer}")
    runner.train(*settings, "learner.zero_stage=3", "placement.learners=2")
    assert "object store" not in runner.console()
    for ours, theirs in zip(runner.metrics()[1:], finished.metrics()[1:], strict=True):
        assert ours["reward/mean"] == pytest.approx(theirs["reward/mean"], abs=1e-6)
        assert ours["actor/grad_norm"] == pytest.approx(theirs["actor/grad_norm"], rel=1e-3)
        assert ours["canary/gap"] < 1e-4


def test_the_critic_is_trained_first_and_a_resume_within_its_warm_up_changes_nothing(runner: Any) -> None:
    settings = ("algorithm=ppo", "steps=4", "critic.warmup_steps=2", "minibatches=2", "max_empty_steps=1")
    runner.train(*settings, "checkpoint.every=1", "checkpoint.keep=9", "engine=transformers")
    lines = runner.metrics()[1:]
    assert [line.get("actor/grad_norm", 0.0) > 0 for line in lines] == [False, False, True, True]
    assert all(line["critic/grad_norm"] > 0 and line["canary/gap"] < 1e-4 for line in lines)
    runner.train(*settings, "checkpoint.every=1", "checkpoint.keep=9", "engine=transformers", "--resume=1")
    assert runner.metrics()[1:] == lines


def test_several_corrections_weigh_together_and_a_resume_changes_nothing(runner: Any) -> None:
    mask = "{use: divergence_mask, level: token, threshold: {from: 1.0e-6, to: 1.0e-4, over: 4}}"
    # Engines whose weights are a step old differ from the learner.
    settings = (
        f"algorithm.correction=[{{use: tis, cap: 1.02}}, {mask}]",
        "rollout.sync_interval=2",
        "steps=4",
        "engine=transformers",
    )
    runner.train(*settings, "checkpoint.every=1", "checkpoint.keep=9")
    lines = runner.metrics()[1:]
    assert [round(line["actor/correction/tis"], 3) for line in lines[::2]] == [1.0, 1.0]
    for line in lines[1::2]:
        weights, kept = line["actor/correction/tis"], line["actor/correction/divergence_mask"]
        assert weights < 1.02 and 0 < kept < 1 and line["actor/correction"] == pytest.approx(kept, rel=0.03)
        assert kept + line["actor/correction/divergence_mask/cut"] == pytest.approx(1)
    runner.train(*settings, "checkpoint.every=1", "checkpoint.keep=9", "--resume=2")
    assert runner.metrics()[1:] == lines


def test_the_entropy_bonus_follows_its_target_across_a_resume(runner: Any) -> None:
    settings = ("algorithm.entropy_coef={target: 0.5, delta: 0.002, max: 0.005}", "learner.lr=1e-4", "steps=5")
    saved = ("checkpoint.every=1", "checkpoint.keep=9", "engine=transformers")
    runner.train(*settings, *saved)
    lines, coef, low = runner.metrics()[1:], 0.0, False
    for line in lines:  # one optimiser step each
        assert line["actor/entropy_coef"] == pytest.approx(coef if low else 0.0, abs=1e-9)
        low = line["actor/entropy"] <= 0.5
        coef = min(max(coef + (0.002 if low else -0.002), 0.0), 0.005)
    runner.train(*settings, *saved, "--resume=2")
    assert runner.metrics()[1:] == lines


def test_two_engines_and_seeds_of_requests_sample_the_same(runner: Any) -> None:
    runner.train("sampling.seeds=request", "name=one")
    runner.train("sampling.seeds=request", "name=two", "placement.engines=2")
    assert [m["reward/mean"] for m in runner.metrics("one")[1:]] == [
        m["reward/mean"] for m in runner.metrics("two")[1:]
    ]


@pytest.mark.parametrize(
    ("name", "metric", "mu"),
    [
        ("remax", "actor/policy_loss", None),
        pytest.param("dpo", "actor/pair_accuracy", None, marks=pytest.mark.long),
        pytest.param("kto", "actor/reference_point", None, marks=pytest.mark.long),
        ("dapo", "raw/reward", None),
        ("{use: mix, policy_loss: {mu: {from: 0.75, to: 0.25, over: 2}}}", "actor/old_kl", [0.75, 0.5, 0.25]),
    ],
)
def test_algorithms_that_want_more_than_groups_train(
    runner: Any, name: str, metric: str, mu: list[float] | None
) -> None:
    """Greedy answers, pairs, right and wrong answers, dynamic sampling, demonstrations with a scheduled weight."""
    # Half of the demonstrations are right; only `mix` reads them.
    runner.train(f"algorithm={name}", "engine=transformers", "tasks.train.demonstrations=0.5", "learner.lr=1e-5")
    lines = runner.metrics()[1:]
    assert len(lines) == 3
    assert all(line["actor/grad_norm"] > 0 for line in lines)
    assert all(metric in line and line["canary/gap"] < 1e-4 for line in lines)
    assert all(line["staleness/max"] == 0 for line in lines)
    assert [line.get("schedule/policy_loss.mu") for line in lines] == (mu or [None] * 3)


def test_gdpo_normalises_each_part_of_the_reward_and_trains_only_the_tokens_of_highest_entropy(runner: Any) -> None:
    algorithm = "algorithm={use: gdpo, top_entropy_quantile: 0.25}"
    runner.train(algorithm, "reward=[countdown, {use: repetition_penalty, weight: 0.5}]", "engine=transformers")
    lines = runner.metrics()[1:]
    assert len(lines) == 3
    assert all(line["actor/grad_norm"] > 0 and line["reward/repetition_penalty"] <= 0 for line in lines)
    assert all(0 < line["advantages/nonzero"] <= 0.27 for line in lines)


def test_several_turns_train(runner: Any) -> None:
    """The learner's logprobs of later turns are those that they were sampled with; `auto` chooses its micro-batches."""
    settings = ("workflow={use: dialogue, turns: 2}", "learner.micro_batch_tokens=auto")
    runner.train(*settings, "model.max_length=64", "engine=transformers")
    assert re.search(
        r"micro_batch_tokens: auto is \d+, with .* free", (runner.path() / "logs/learner-0.log").read_text()
    )
    lines = runner.metrics()[1:]
    assert all(1 < line["workflow/turns"] <= 2 for line in lines)
    assert abs(lines[0]["actor/kl_to_behaviour"]) < 1e-6
    assert all(line["canary/gap"] < 1e-4 for line in lines)


@pytest.mark.long
def test_a_critic_and_a_reference_model_in_processes_of_their_own_change_nothing(runner: Any) -> None:
    ppo = ["algorithm={use: ppo, kl: k3, kl_coef: 0.01}", "steps=3", "sampling.seeds=request"]
    runner.train(*ppo, "name=one")
    runner.train(*ppo, "name=apart", "critic.ranks=1", "reference={ranks: 1, learner: {zero_stage: 0}}")
    names = ("reward/mean", "actor/loss", "actor/ref_kl", "critic/loss", "actor/grad_norm", "critic/grad_norm")
    one, apart = (runner.metrics(name)[1:] for name in ("one", "apart"))
    assert [[line[name] for name in names] for line in one] == [[line[name] for name in names] for line in apart]
    assert {path.name for path in (runner.path("apart") / "logs").glob("*-0.log")} >= {
        "learner-0.log",
        "critic-0.log",
        "reference-0.log",
    }


def test_a_reference_model_follows_the_policy_and_is_resumed(runner: Any) -> None:
    follows = ("algorithm={use: grpo, kl: k3, kl_coef: 0.1}", "reference.update_every=2", "minibatches=1")
    settings = (*follows, "engine=transformers", "checkpoint={every: 3, keep: 2}", "eval={before: false, after: false}")
    runner.train(*settings, "steps=5", "name=alone")
    lines = runner.metrics("alone")
    assert [line["reference/age"] for line in lines] == [1, 0, 1, 0, 1]
    drift = [line["actor/ref_kl"] for line in lines]
    assert max(drift[0], drift[2], drift[4]) < 1e-9 < 1e-7 < min(drift[1], drift[3])
    runner.train(*settings, "steps=3")
    runner.train(*settings, "steps=5", "--resume")
    assert runner.metrics() == lines


def test_a_sampler_goes_on_with_its_memory_after_a_resume(runner: Any) -> None:
    page = (Path(__file__).parents[2] / "docs" / "howto" / "tasks.md").read_text()
    documented = re.search(r"^rollout: \{sampler: \{(use: by_pass_rate, target: .+)\}\}$", page, re.MULTILINE)
    assert documented is not None
    sampler = f"rollout.sampler={{{documented[1]}, passing: 0.1}}"
    settings = (sampler, "engine=transformers", "eval={before: false, after: false}")
    runner.train(*settings, "steps=4", "checkpoint={every: 2, keep: 2}", "name=alone")
    state = json.loads((runner.path("alone") / "checkpoints" / "step-2" / "state.json").read_text())
    (source,) = state["tasks"].values()
    assert len(source["sampler"]["state"]["rates"]) > 1
    assert runner.metrics("alone")[-1]["sampler/seen"] > 1
    runner.train(*settings, "steps=2")
    runner.train(*settings, "steps=4", "--resume")
    assert runner.metrics() == runner.metrics("alone")
