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
from rlsdk.errors import OptionError
from rlsdk.learners.deepspeed import DeepSpeedLearner
from rlsdk.learners.model import load_policy
from rlsdk.learners.router import ExpertTotals, ExpertUse, RouterLoss
from rlsdk.learners.rows import to_rows
from rlsdk.marks import policy_loss
from rlsdk.plugins import Plugins, load

ASKED = {"output_router_logits": True, "router_aux_loss_coef": 0.25}


@policy_loss("likelihood")
def likelihood(x: Any) -> Any:
    """Minus the logprobs."""
    return -x.logprobs


def whole(penalty: RouterLoss, use: ExpertUse) -> torch.Tensor:
    """The penalty of tokens that are one micro-batch."""
    return penalty(use, ExpertTotals(use.counts, use.tokens, 1.0))


def of_logits(penalty: RouterLoss, *layers: torch.Tensor) -> torch.Tensor:
    return whole(penalty, penalty.use(layers))


def test_equal_shares_cost_as_many_as_are_chosen_and_one_favourite_costs_all() -> None:
    even = torch.eye(4) * 1e-3  # each token prefers another expert, a little
    assert of_logits(RouterLoss(1.0, 4, 1), even).item() == pytest.approx(1.0, abs=1e-3)
    assert of_logits(RouterLoss(1.0, 4, 2), even, even).item() == pytest.approx(2.0, abs=1e-3)
    favourite = torch.tensor([[50.0, 0.0, 0.0, 0.0]] * 3)
    assert of_logits(RouterLoss(1.0, 4, 1), favourite).item() == pytest.approx(4.0)


def test_it_is_the_loss_of_transformers_in_float32() -> None:
    layers = tuple(torch.randn(11, 6, generator=torch.Generator().manual_seed(i)) for i in range(3))
    found = of_logits(RouterLoss(1.0, 6, 2), *layers)
    torch.testing.assert_close(found, load_balancing_loss_func(layers, 6, 2))
    narrow = of_logits(RouterLoss(1.0, 6, 2), *(layer.bfloat16() for layer in layers))
    assert narrow.dtype == torch.float32


def test_parts_of_micro_batches_add_up_to_the_loss_of_all_tokens() -> None:
    """Unlike a mean of the micro-batches' own losses: here each of these has one favourite, all together have none."""
    penalty, favourite = RouterLoss(1.0, 2, 1), torch.tensor([[9.0, 0.0]] * 3)
    parts = [penalty.use([favourite]), penalty.use([favourite.flip(1)])]
    totals = ExpertTotals(parts[0].counts + parts[1].counts, 6, 1.0)
    together = of_logits(penalty, torch.cat([favourite, favourite.flip(1)]))
    torch.testing.assert_close(penalty(parts[0], totals) + penalty(parts[1], totals), together)
    assert together.item() == pytest.approx(1.0) and whole(penalty, parts[0]).item() == pytest.approx(2.0, abs=1e-3)


@pytest.mark.parametrize("name", ["qwen3-moe", "mixtral", "gpt-oss"])
def test_a_model_is_trained_with_it_only_if_its_config_asks(name: str, tmp_path: Path) -> None:
    def of(**options: Any) -> RouterLoss | None:
        architectures.make(tmp_path, name, **options)
        return RouterLoss.of(AutoConfig.from_pretrained(tmp_path))

    assert of() is None
    assert of(output_router_logits=True, router_aux_loss_coef=0.0) is None
    assert of(**ASKED) == RouterLoss(0.25, 4, 2)
    config = AutoConfig.from_pretrained(tmp_path)
    assert RouterLoss.of(config, 0.0) is None and RouterLoss.of(config, 0.5) == RouterLoss(0.5, 4, 2)


def test_models_without_a_coefficient_have_none(tmp_path: Path) -> None:
    for name in ("llama", "deepseek-v3", "glm4-moe"):
        architectures.make(tmp_path / name, name, output_router_logits=True)
        assert RouterLoss.of(AutoConfig.from_pretrained(tmp_path / name)) is None


def test_the_option_of_a_learner_overrides_the_config_and_needs_experts(tmp_path: Path) -> None:
    moe, dense = (architectures.make(tmp_path / name, name) for name in ("qwen3-moe", "llama"))
    learner = DeepSpeedLearner(router_loss_coef=0.1)
    assert not learner.model_faults(moe) and not DeepSpeedLearner(router_loss_coef=0.0).model_faults(dense)
    (fault,) = learner.model_faults(dense)
    assert fault == "router_loss_coef: a LlamaForCausalLM has no experts to balance; leave it out"
    for name in ("deepseek-v3", "glm4-moe"):  # which choose by sigmoids and a bias
        (fault,) = learner.model_faults(architectures.make(tmp_path / name, name))
        assert "does not simply choose the experts of greatest probability" in fault
    moe.model.layers[0].mlp.gate.register_buffer("e_score_correction_bias", torch.zeros(4))  # as in MiniMax-M2
    (fault,) = learner.model_faults(moe)
    assert "does not simply choose" in fault
    with pytest.raises(OptionError, match=r"ranks that share rollouts do not compute it; set sequence_para.*=1, or 0"):
        load("learner", "deepspeed", router_loss_coef=0.1, sequence_parallel=2)


@pytest.mark.parametrize(
    ("checkpointing", "option", "config"),
    [(False, None, ASKED), (True, None, ASKED), (True, 0.25, {"router_aux_loss_coef": 0.5})],
)
def test_gradients_of_a_policy_are_those_of_transformers(
    checkpointing: bool, option: float | None, config: dict[str, Any], tmp_path: Path
) -> None:
    architectures.make(tmp_path, "qwen3-moe", **config)
    ids = np.random.default_rng(0).integers(3, 100, 30)
    policy = load_policy(Model(path=str(tmp_path)), "sdpa", checkpointing, router_loss=option)
    assert policy.model.config.output_router_logits == (option is None)  # as in exports
    rows = to_rows(_batch(ids[None]), "padded")
    policy(rows)
    use = policy.take_use()
    assert use is not None and policy.take_use() is None
    assert policy.router_loss is not None and policy.router_loss.coefficient == 0.25
    found = whole(policy.router_loss, use)
    found.backward()
    plain = AutoModelForCausalLM.from_pretrained(tmp_path)
    # The last token is read by nobody.
    expected = plain(torch.as_tensor(ids[None, :-1]), output_router_logits=True).aux_loss
    expected.backward()
    torch.testing.assert_close(found, expected)
    gradients = dict(policy.model.named_parameters())
    for key, parameter in plain.named_parameters():
        if parameter.grad is not None:
            torch.testing.assert_close(gradients[key].grad, parameter.grad, msg=key)


@pytest.mark.parametrize("style", ["packed", "shared"])
def test_padding_and_prompts_do_not_count(style: Any, tmp_path: Path) -> None:
    architectures.make(tmp_path, "mixtral", **ASKED)
    policy = load_policy(Model(path=str(tmp_path)), "eager", False)
    batch = _batch(*(np.random.default_rng(i).integers(3, 100, (1, 9 + 5 * i)) for i in range(3)))
    policy(to_rows(batch, "padded"))
    padded = policy.take_use()
    policy(to_rows(batch, style))
    found = policy.take_use()
    assert found is not None and padded is not None and found.tokens == padded.tokens
    torch.testing.assert_close(found.counts, padded.counts)
    torch.testing.assert_close(found.probabilities, padded.probabilities)


def _batch(*rollouts: np.ndarray) -> TrainBatch:
    lengths = np.array([rollout.size for rollout in rollouts])
    return TrainBatch(
        token_ids=np.concatenate([rollout.reshape(-1) for rollout in rollouts]),
        lengths=lengths,
        starts=np.ones(len(lengths), np.int64),
        responses=lengths - 1,
        loss_mask=np.ones(int((lengths - 1).sum()), bool),
    )


def test_ranks_that_share_rollouts_refuse_it_unless_it_is_switched_off(tmp_path: Path) -> None:
    model = architectures.make(tmp_path, "qwen3-moe", **ASKED)
    (fault,) = DeepSpeedLearner(sequence_parallel=2).model_faults(model)
    assert "load-balancing loss (output_router_logits: true" in fault
    assert fault.endswith("set learner.router_loss_coef=0")
    assert not DeepSpeedLearner(sequence_parallel=2, router_loss_coef=0.0).model_faults(model)
    assert not DeepSpeedLearner().model_faults(model)


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


@pytest.mark.stack
def test_a_split_changes_neither_metrics_nor_weights(
    launch: Callable[..., Any], make_grouped_batch: Callable[..., TrainBatch], tmp_path: Path
) -> None:
    """The shares of experts are those of all rollouts of an optimiser step, also if calls accumulate them."""
    architectures.make(tmp_path, "mixtral")
    batch, spec = make_grouped_batch(12), LossSpec(policy_loss=Plugins().reference("policy_loss", likelihood))
    results = []
    for world, stage, tokens, rows in (
        (1, 1, 10_000, "padded"),
        (1, 0, 60, "tree"),
        (2, 2, 60, "shared"),
        (2, 3, 25, "padded"),
        (2, 3, 60, "shared"),
    ):
        options = {"zero_stage": stage, "micro_batch_tokens": tokens, "rows": rows, "attention": "eager", "eps": 1e-2}
        roles = Roles(actor=Model(path=str(tmp_path)))
        group = launch(world, roles, spec, router_loss_coef=5.0, lr=1e-2, **options)
        metrics = group.update(batch, [np.arange(12)], 0)
        results.append((metrics, group.fetch_weights(1).tensors))
    first_metrics, first = results[0]
    assert first_metrics["actor/loss"] - first_metrics["actor/policy_loss"] == pytest.approx(
        5.0 * first_metrics["actor/router_loss"], rel=1e-4
    )
    for metrics, weights in results[1:]:
        assert metrics == pytest.approx(first_metrics, rel=1e-4, abs=1e-6)
        for name, array in first.items():
            np.testing.assert_allclose(weights[name], array, atol=2e-5, err_msg=name)


@pytest.mark.stack
def test_ranks_with_unequal_numbers_of_micro_batches_make_the_same_backward_passes(
    launch: Callable[..., Any], make_batch: Callable[..., TrainBatch], tmp_path: Path
) -> None:
    """ZeRO-3 compares the order of modules over ranks, and the penalty's gradient adds to that of a router."""
    architectures.make(tmp_path, "mixtral")
    many = make_batch(20)
    batch = many.select(np.argsort(-many.lengths)[[0, -4, -3, -2, -1]])  # the first rank gets one, the second four
    spec = LossSpec(policy_loss=Plugins().reference("policy_loss", likelihood))
    roles, metrics = Roles(actor=Model(path=str(tmp_path))), []
    for world, stage in ((1, 1), (2, 3)):
        options = {"zero_stage": stage, "micro_batch_tokens": 1, "lr": 1e-2, "eps": 1e-2}
        group = launch(world, roles, spec, router_loss_coef=1.0, **options)
        metrics.append(group.update(batch, [np.arange(5)] * 2, 0))
    assert metrics[1] == pytest.approx(metrics[0], rel=1e-4)
