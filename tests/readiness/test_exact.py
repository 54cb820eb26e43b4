"""`model.exact` is refused, with the reason, before anything starts if it cannot hold."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

import rlsdk
from rlsdk import nano
from rlsdk.config import check
from rlsdk.readiness.checks import examine
from rlsdk.readiness.explained import batch
from tests.architectures import make

BASE = [
    "name=run",
    "tasks.train={use: countdown, template: compact}",
    "max_prompt_tokens=64",
    "reward=countdown",
    "sampling.max_tokens=8",
    "steps=1",
    "group_size=2",
    "engine=transformers",
    "model.exact=true",
    "model.max_length=128",
    "placement.device=cpu",
    "placement.engine_threads=1",
    "placement.learner_threads=1",
]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("nano") / "model"
    nano.create(folder)
    return folder


def faults(model: Path, *settings: str) -> list[str]:
    plan = check({"model": {"path": str(model)}, "out": str(model.parent)}, [*BASE, *settings])
    return [str(each) for each in examine(plan, starts=False).faults]


def test_a_plan_that_can_be_exact_has_no_faults(model: Path) -> None:
    assert faults(model) == []
    assert faults(model, "engine=vllm", "model.exact=false") == []


@pytest.mark.parametrize(
    ("setting", "says"),
    [
        ("engine=vllm", "engine: model.exact: the engine 'core/vllm' computes logprobs in its own way"),
        ("model.dtype=bfloat16", "model.dtype: model.exact needs float32, got bfloat16"),
        ("engine.compile=true", "engine: model.exact: compile: true fuses operations"),
        ("learner.compile=true", "learner: model.exact: compile: true fuses operations"),
        ("learner.lora={rank: 2, alpha: 4}", "learner: model.exact: lora multiplies by the adapter separately"),
        ("learner.sequence_parallel=2", "learner: model.exact: sequence_parallel: 2"),
        ("learner.rows=packed", "learner: model.exact: rows: packed"),
        ("learner.attention=eager", "learner: model.exact: attention: eager"),
        ("rollout.max_staleness=1", "rollout: model.exact: tokens of older weights"),
        ("old_logprobs=rollout", "old_logprobs: model.exact compares"),
        ("placement.device=cuda", "placement.device: model.exact requires a CPU"),
        ("placement.learner_threads=2", "placement.learner_threads: model.exact: engines with 1 threads"),
        ("algorithm=dpo", "algorithm: model.exact: an algorithm of pairs"),
    ],
)
def test_what_would_make_a_difference_is_refused(model: Path, setting: str, says: str) -> None:
    assert any(each.startswith(says) for each in faults(model, setting)), faults(model, setting)


def test_the_passes_of_an_exact_learner_are_explained_without_a_token_budget(model: Path) -> None:
    plan = check({"model": {"path": str(model)}, "out": str(model.parent)}, [*BASE, "model.max_length=48"])
    expected = "each rollout in a forward pass of its own, padded to 48 tokens (model.exact)"
    assert batch(plan)["micro-batches"] == expected


def test_a_loss_that_compares_the_rollouts_of_a_group_is_refused(model: Path) -> None:
    @rlsdk.policy_loss("contrast", needs=("groups",))
    def contrast(x: rlsdk.LossInputs) -> torch.Tensor:
        return -x.advantages * x.logprobs

    config = {"model": {"path": str(model)}, "out": str(model.parent), "algorithm": {"policy_loss": contrast}}
    found = [str(each) for each in examine(check(config, BASE), starts=False).faults]
    assert len(found) == 1 and re.match(
        r"algorithm: model.exact computes one rollout at a time, but '.*contrast'", found[0]
    ), found


def test_a_model_of_experts_is_refused(tmp_path: Path) -> None:
    make(tmp_path, "mixtral")
    assert any("has experts" in each for each in faults(tmp_path))
