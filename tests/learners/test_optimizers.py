"""Optimisers as components: their steps by hand, the learner that runs them, and the faults of a configuration."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import rlsdk
from rlsdk.config import check
from rlsdk.contracts import Roles, TrainBatch
from rlsdk.errors import CheckpointError, LearnerError, OptionError, RunError
from rlsdk.learners.deepspeed import DeepSpeedLearner
from rlsdk.marks import optimizer
from rlsdk.opening.changes import settings_of
from rlsdk.plugins import Plugins, load
from tests.learners.full_gradients import check_steps_are_torchs
from tests.learners.test_learner import everything, halves, poisoned, same, spec

Launch = Callable[..., Any]
Make = Callable[..., TrainBatch]
MOMENTUM = {"use": "sgd", "momentum": 0.9}


@optimizer("half_sign", whole_tensors=True)
class HalfSign(torch.optim.Optimizer):
    """Steps of half the learning rate against the gradient's sign, by tensors whose shapes it keeps."""

    def __init__(self, groups: list[dict[str, Any]], *, share: float = 0.5) -> None:
        super().__init__(groups, {"share": share})
        self.shapes = {n: p.shape for g in groups for n, p in zip(g["param_names"], g["params"], strict=True)}

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """Take a step."""
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    assert parameter.shape in self.shapes.values() and parameter.dim() < 3
                    parameter.sub_(group["lr"] * group["share"] * parameter.grad.sign())


def make(name: Any, parameters: list[torch.nn.Parameter], **options: Any) -> torch.optim.Optimizer:
    """Create an optimiser of parameters, half of which have a weight decay of 0.1."""
    names = [f"w{i}" for i in range(len(parameters))]
    groups = [
        {"params": [p], "param_names": [n], "lr": 0.5, "weight_decay": 0.1 * (i % 2)}
        for i, (p, n) in enumerate(zip(parameters, names, strict=True))
    ]
    made: torch.optim.Optimizer = load("optimizer", name, **options)(groups)
    return made


def test_two_steps_of_sgd_with_momentum_are_those_computed_by_hand() -> None:
    plain, decayed = (torch.nn.Parameter(torch.tensor([2.0, -1.0], dtype=torch.float64)) for _ in range(2))
    made = make("sgd", [plain, decayed], momentum=0.9)
    for gradient in ([0.4, -0.2], [-0.1, 0.6]):
        for each in (plain, decayed):
            each.grad = torch.tensor(gradient, dtype=torch.float64)
        made.step()
    # b1 = [0.4, -0.2], w1 = [1.8, -0.9]; b2 = 0.9 b1 + [-0.1, 0.6] = [0.26, 0.42]
    torch.testing.assert_close(plain.detach(), torch.tensor([1.67, -1.11], dtype=torch.float64))
    # b1 = [0.6, -0.3], w1 = [1.7, -0.85]; b2 = 0.9 b1 + [-0.1, 0.6] + 0.1 w1 = [0.61, 0.245]
    torch.testing.assert_close(decayed.detach(), torch.tensor([1.395, -0.9725], dtype=torch.float64))


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"optimizer": "sdg"}, "optimizer: unknown optimizer 'sdg'; core offers: adamw, sgd; did you mean 'sgd'?"),
        ({"optimizer": {"use": "sgd", "momentm": 0.9}}, "optimizer.momentm: unknown option 'momentm', did you mean"),
        ({"optimizer": {"use": "sgd", "momentum": 1.0}}, "optimizer.momentum: expected float >= 0 and < 1, got 1.0"),
        ({"optimizer": "sgd", "betas": [0.9, 0.99]}, "betas belongs to optimizer: adamw; got sgd"),
        ({"optimizer": "sgd", "eps": 1e-6}, "eps belongs to optimizer: adamw; got sgd"),
        (
            {"optimizer": {"use": "adamw", "betas": [0.9, 0.99]}},
            "optimizer.betas: AdamW takes it from the learner; set",
        ),
        ({"optimizer": HalfSign}, "half_sign needs whole tensors, but zero_stage: 1 flattens them; set zero_stage: 0"),
    ],
)
def test_an_optimiser_that_cannot_run_is_refused_with_the_configuration(options: Any, said: str) -> None:
    plugins = Plugins()
    with pytest.raises(OptionError) as caught:
        plugins.resolve(plugins.reference("learner", "deepspeed", options))
    assert said in str(caught.value)


def test_an_optimiser_is_refused_with_a_model_that_it_cannot_train() -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(vocab_size=8, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1)
    plugins = Plugins()

    def faults(dtype: torch.dtype, **options: Any) -> str:
        learner = plugins.resolve(plugins.reference("learner", "deepspeed", options))
        return "; ".join(learner.model_faults(LlamaForCausalLM(config).to(dtype)))

    whole = {"optimizer": HalfSign, "zero_stage": 0}
    assert faults(torch.float32, **whole) == ""
    assert "half_sign needs whole tensors, but DeepSpeed flattens" in faults(torch.bfloat16, **whole)
    nesterov = {"optimizer": {"use": "sgd", "nesterov": True}}
    assert "Nesterov momentum requires a momentum" in faults(torch.float32, **nesterov)
    both = faults(torch.float32, **nesterov, attention="flash_attention_2")
    assert "Nesterov momentum requires a momentum" in both and "flash attention cannot compute in float32" in both


@pytest.mark.parametrize(
    ("broken", "error", "said"),
    [
        (lambda groups: None, LearnerError, "returned a NoneType; expected a torch.optim.Optimizer"),
        (lambda groups: torch.optim.SGD(groups[:1]), LearnerError, "has 1 of 2 parameters in its groups"),
        (lambda groups: torch.optim.SGD(groups, lr="fast"), RunError, "optimizer 'broken' failed: TypeError"),
    ],
)
def test_a_component_that_creates_no_optimiser_of_its_parameters_is_named(
    broken: Any, error: type[Exception], said: str
) -> None:
    learner = DeepSpeedLearner(optimizer=rlsdk.Use(optimizer("broken")(broken)))
    groups = [{"params": [torch.nn.Parameter(torch.ones(2))], "param_names": [name]} for name in "ab"]
    with pytest.raises(error, match=said):
        learner.make_optimizer(groups, lr=0.1)


def test_the_size_of_the_state_is_measured() -> None:
    sizes = {
        str(each): DeepSpeedLearner(optimizer=each, zero_stage=0).state_bytes
        for each in map(rlsdk.Use, ("adamw", "sgd"))
    }
    sizes["momentum"] = DeepSpeedLearner(optimizer=rlsdk.Use("sgd", momentum=0.9)).state_bytes
    assert list(sizes.values()) == [8.0, 0.0, 4.0]


STAGES = [(1, 0, "tied"), (1, 1, "bfloat"), (2, 2, "untied"), (2, 3, "untied")]


@pytest.mark.stack
@pytest.mark.usefixtures("forgiving")
@pytest.mark.parametrize(("world", "stage", "which"), STAGES)
def test_sgd_is_torchs_in_every_stage_also_when_resumed(
    world: int,
    stage: int,
    which: str,
    launch: Launch,
    make_batch: Make,
    tmp_path: Path,
    request: pytest.FixtureRequest,
) -> None:
    model, batch, checkpoint = request.getfixturevalue(which), make_batch(10), tmp_path / "checkpoint"
    decay = {"weight_decay": 0.1, "weight_decay_on": "matrices"}
    options = {"zero_stage": stage, "lr": 0.5, "grad_clip": 0.0, "optimizer": MOMENTUM, **decay}
    start = partial(launch, world, Roles(actor=model), spec(), **options)
    sgd = partial(torch.optim.SGD, lr=0.5, momentum=0.9)
    check_steps_are_torchs(start, model, batch, everything(batch), sgd, decay=0.1, steps=3, checkpoint=checkpoint)
    with pytest.raises(CheckpointError, match="optimizer 'sgd' there, 'adamw' here"):
        launch(world, Roles(actor=model), spec(), zero_stage=stage, **decay).load(checkpoint)


LORA = {"rank": 4, "alpha": 8, "targets": ["q_proj", "v_proj"]}
RUNS = [
    (1, "tied", {"zero_stage": 0, "optimizer": HalfSign}),
    (2, "tied", {"zero_stage": 2, "optimizer": MOMENTUM}),
    (1, "tied", {"zero_stage": 3, "offload": "all", "optimizer": MOMENTUM}),
    (1, "bfloat", {"zero_stage": 1, "optimizer": MOMENTUM, "lora": LORA}),
]


@pytest.mark.stack
@pytest.mark.parametrize(("world", "which", "options"), RUNS)
def test_policy_and_critic_skip_a_bad_update_and_resume_bit_by_bit(
    world: int,
    which: str,
    options: Any,
    launch: Launch,
    make_batch: Make,
    tmp_path: Path,
    request: pytest.FixtureRequest,
) -> None:
    model, batch = request.getfixturevalue(which), make_batch(6)
    roles, options = Roles(actor=model, critic=model), {"schedule": "linear", "warmup_steps": 2, "lr": 0.1, **options}
    group = launch(world, roles, spec(value_clip=0.2), **options)
    first = group.update(batch, halves(batch), 0)
    assert first["actor/grad_norm"] > 0 and first["critic/grad_norm"] > 0
    before = group.fetch_weights(1)
    skipped = group.update(poisoned(batch), everything(batch), 1)
    assert skipped["actor/skipped_updates"] == 1.0 and same(before, group.fetch_weights(1))
    group.save(tmp_path / "checkpoint")
    alone = [group.update(batch, halves(batch), step) for step in (2, 3)]
    weights, values = group.fetch_weights(3), group.values(batch)
    assert not same(before, weights)

    group = launch(world, roles, spec(value_clip=0.2), **options)
    group.load(tmp_path / "checkpoint")
    assert [group.update(batch, halves(batch), step) for step in (2, 3)] == alone
    assert same(weights, group.fetch_weights(3)) and np.array_equal(values, group.values(batch))


LAB = """
import rlsdk, torch


@rlsdk.optimizer("slow")
def slow(groups, *, share: float = 0.5):
    \"\"\"SGD.\"\"\"
    return torch.optim.SGD([{**group, "lr": group["lr"] * share} for group in groups])
"""


def test_an_optimiser_of_a_plugin_file_is_found_by_ranks_which_get_the_file(tmp_path: Path) -> None:
    file = tmp_path / "opt_lab.py"
    file.write_text(LAB)
    driver = Plugins([file])
    reference = driver.reference("learner", "deepspeed", {"optimizer": {"use": "opt_lab/slow", "share": 0.25}})
    assert [(each.kind, each.name) for each in reference.named] == [("optimizer", "opt_lab/slow")]
    file.unlink()
    weight = torch.nn.Parameter(torch.ones(1))
    learner = Plugins().resolve(reference)  # as a rank does
    made = learner.make_optimizer([{"params": [weight], "param_names": ["weight"]}], lr=1.0)
    assert made.param_groups[0]["lr"] == 0.25
    assert learner.optimizer_name == "opt_lab/slow"


def test_an_optimiser_of_a_run_is_kept_and_compared_with_its_defaults() -> None:
    tree = {
        "steps": 1,
        "model": "o/m",
        "tasks": {"train": {"use": "countdown", "split": "train", "size": 8}},
        "reward": "countdown",
    }

    def settings(*overrides: str) -> dict[str, Any]:
        found = settings_of(check({"name": "x", **tree}, overrides))
        return {path: value for path, value in found.items() if path.startswith("learner.optimizer")}

    assert settings() == settings("learner.optimizer=adamw") == {"learner.optimizer.use": "adamw"}
    sgd = {"learner.optimizer.use": "sgd", "learner.optimizer.momentum": 0.9, "learner.optimizer.nesterov": False}
    assert settings("learner.optimizer={use: sgd, momentum: 0.9}") == sgd
