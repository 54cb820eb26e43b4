"""The load-balancing loss of mixtures of experts: its value, and when it is used."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.models.qwen3_moe.modeling_qwen3_moe import load_balancing_loss_func

sys.path.insert(0, str(Path(__file__).parents[1]))
import architectures

from rlsdk.contracts import LossSpec, Model, Roles, TrainBatch
from rlsdk.learners.model import load_policy
from rlsdk.learners.router import RouterLoss
from rlsdk.learners.rows import to_rows
from rlsdk.learners.ulysses import sequence_faults
from rlsdk.marks import policy_loss
from rlsdk.plugins import Plugins

ASKED = {"output_router_logits": True, "router_aux_loss_coef": 0.25}


@policy_loss("likelihood")
def likelihood(x: Any) -> Any:
    """Minus the logprobs."""
    return -x.logprobs


def test_equal_shares_cost_as_many_as_are_chosen_and_one_favourite_costs_all() -> None:
    even = torch.eye(4) * 1e-3  # each token prefers another expert, a little
    assert RouterLoss(1.0, 4, 1)([even]).item() == pytest.approx(1.0, abs=1e-3)
    assert RouterLoss(1.0, 4, 2)([even, even]).item() == pytest.approx(2.0, abs=1e-3)
    favourite = torch.tensor([[50.0, 0.0, 0.0, 0.0]] * 3)
    assert RouterLoss(1.0, 4, 1)([favourite]).item() == pytest.approx(4.0)


def test_it_is_the_loss_of_transformers_in_float32() -> None:
    layers = tuple(torch.randn(11, 6, generator=torch.Generator().manual_seed(i)) for i in range(3))
    found = RouterLoss(1.0, 6, 2)(layers)
    torch.testing.assert_close(found, load_balancing_loss_func(layers, 6, 2))
    narrow = RouterLoss(1.0, 6, 2)([layer.bfloat16() for layer in layers])
    assert narrow.dtype == torch.float32


@pytest.mark.parametrize("name", ["qwen3-moe", "mixtral", "gpt-oss"])
def test_a_model_is_trained_with_it_only_if_its_config_asks(name: str, tmp_path: Path) -> None:
    def of(**options: Any) -> RouterLoss | None:
        architectures.make(tmp_path, name, **options)
        return RouterLoss.of(AutoConfig.from_pretrained(tmp_path))

    assert of() is None
    assert of(output_router_logits=True, router_aux_loss_coef=0.0) is None
    assert of(**ASKED) == RouterLoss(0.25, 4, 2)


def test_models_without_a_coefficient_have_none(tmp_path: Path) -> None:
    for name in ("llama", "deepseek-v3", "glm4-moe"):
        architectures.make(tmp_path / name, name, output_router_logits=True)
        assert RouterLoss.of(AutoConfig.from_pretrained(tmp_path / name)) is None


@pytest.mark.parametrize("checkpointing", [False, True])
def test_gradients_of_a_policy_are_those_of_transformers(checkpointing: bool, tmp_path: Path) -> None:
    architectures.make(tmp_path, "qwen3-moe", **ASKED)
    ids = np.random.default_rng(0).integers(3, 100, 30)
    policy = load_policy(Model(path=str(tmp_path)), "sdpa", checkpointing)
    rows = to_rows(_batch(ids[None]), "padded")
    policy(rows)
    found = policy.take_balance()
    assert found is not None and policy.take_balance() is None
    found.backward()
    plain = AutoModelForCausalLM.from_pretrained(tmp_path)
    expected = plain(torch.as_tensor(ids[None, :-1])).aux_loss  # the last token is read by nobody
    expected.backward()
    torch.testing.assert_close(found, expected)
    gradients = dict(policy.model.named_parameters())
    for key, parameter in plain.named_parameters():
        if parameter.grad is not None:
            torch.testing.assert_close(gradients[key].grad, parameter.grad, msg=key)
    with torch.no_grad():
        policy(rows)
    assert policy.take_balance() is None


@pytest.mark.parametrize("style", ["packed", "shared"])
def test_padding_and_prompts_do_not_count(style: Any, tmp_path: Path) -> None:
    architectures.make(tmp_path, "mixtral", **ASKED)
    policy = load_policy(Model(path=str(tmp_path)), "eager", False)
    batch = _batch(*(np.random.default_rng(i).integers(3, 100, (1, 9 + 5 * i)) for i in range(3)))
    policy(to_rows(batch, "padded"))
    padded = policy.take_balance()
    policy(to_rows(batch, style))
    torch.testing.assert_close(policy.take_balance(), padded)


def _batch(*rollouts: np.ndarray) -> TrainBatch:
    lengths = np.array([rollout.size for rollout in rollouts])
    return TrainBatch(
        token_ids=np.concatenate([rollout.reshape(-1) for rollout in rollouts]),
        lengths=lengths,
        starts=np.ones(len(lengths), np.int64),
        responses=lengths - 1,
        loss_mask=np.ones(int((lengths - 1).sum()), bool),
    )


def test_ranks_that_share_rollouts_refuse_it(tmp_path: Path) -> None:
    architectures.make(tmp_path, "qwen3-moe", **ASKED)
    (fault,) = sequence_faults(AutoModelForCausalLM.from_pretrained(tmp_path), 2)
    assert "load-balancing loss (output_router_logits: true" in fault


@pytest.mark.stack
@pytest.mark.parametrize("stage", [1, 3])
def test_an_update_reports_it_and_adds_it_to_the_loss(
    stage: int, launch: Callable[..., Any], make_batch: Callable[..., TrainBatch], tmp_path: Path
) -> None:
    architectures.make(tmp_path, "qwen3-moe", **ASKED)
    batch, spec = make_batch(8), LossSpec(policy_loss=Plugins().reference("policy_loss", likelihood))
    group = launch(2, Roles(actor=Model(path=str(tmp_path))), spec, zero_stage=stage, lr=1e-3)
    metrics = group.update(batch, [np.arange(8)], 0)
    assert 2.0 < metrics["actor/router_loss"] < 4.0
    added = metrics["actor/loss"] - metrics["actor/policy_loss"]
    assert added == pytest.approx(0.25 * metrics["actor/router_loss"], rel=1e-3)
