"""The primitives of the learner on real DeepSpeed and Ray, which `update` consists of, and the learning rate."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import pytest
import torch

from rlsdk.batch import LossInputs
from rlsdk.contracts import LossSpec, Model, Roles, TrainBatch
from rlsdk.errors import LearnerError
from rlsdk.learners.deepspeed import DeepSpeedLearner
from rlsdk.marks import learner, policy_loss
from rlsdk.plugins import Plugins
from rlsdk.trainer.credit import train_critic
from tests.learners.full_gradients import gradients, keep_gradients

pytestmark = pytest.mark.stack
Launch = Callable[..., Any]
Make = Callable[..., TrainBatch]


@policy_loss("counting")
class Counting:
    """A policy gradient that counts optimiser steps, and tells a loss which of how many it is in."""

    def __init__(self) -> None:
        self.steps = 0

    def __call__(self, x: LossInputs) -> tuple[torch.Tensor, dict[str, float]]:
        where = {"step": x.step, "of_steps": x.of_steps, "train_step": x.train_step, "seen": self.steps}
        return -x.advantages * x.logprobs, {name: float(value) for name, value in where.items()}

    def advance(self, metrics: Any) -> None:
        self.steps += 1

    def state(self) -> int:
        return self.steps

    def restore(self, state: int) -> None:
        self.steps = state


@learner("bare")
class Bare:
    """A learner with an `update`, and neither primitives nor a learning rate that can be set."""

    def __init__(self) -> None:
        self._learner = DeepSpeedLearner(lr=1e-2)

    def environment(self, place: Any) -> Any:
        return self._learner.environment(place)

    def start(self, *args: Any) -> None:
        self._learner.start(*args)

    def update(self, minibatches: Any, step: int) -> dict[str, float]:
        return self._learner.update(minibatches, step)


def spec(loss: Any = Counting, **changes: Any) -> LossSpec:
    return attrs.evolve(LossSpec(policy_loss=Plugins().reference("policy_loss", loss)), **changes)


def gradient_row(group: Any, role: str) -> np.ndarray:
    """The full gradients of the last optimiser step, in one row."""
    return np.concatenate([gradient.ravel() for gradient in gradients(group, role)[0].values()])


@pytest.mark.parametrize(("world", "stage"), [(1, 0), (2, 2), (2, 3)])
def test_gradients_of_two_batches_add_up_to_the_gradient_of_both(
    world: int, stage: int, tied: Model, launch: Launch, make_batch: Make
) -> None:
    first, second = make_batch(7), make_batch(9, seed=1)
    both = TrainBatch.concatenate([first, second])
    options = {"zero_stage": stage, "micro_batch_tokens": 60, "lr": 1e-2, "critic_lr": 1e-2}
    group = launch(world, Roles(actor=tied, critic=tied), spec(value_clip=10.0), **options)
    keep_gradients(group)
    expected = group.update(both, [np.arange(16)], 3)
    whole = {role: gradient_row(group, role) for role in ("actor", "critic")}

    group = launch(world, Roles(actor=tied, critic=tied), spec(value_clip=10.0), **options)
    keep_gradients(group)
    for batch in (first, second):
        for role in ("actor", "critic"):
            group.forward_backward(batch, both.totals, role=role, step=3, last=batch is second)
    found = group.optimizer_step("actor") | group.optimizer_step("critic")
    assert found == pytest.approx(expected, rel=1e-4, abs=1e-6)
    for role, gradient in whole.items():
        assert np.linalg.norm(gradient_row(group, role) - gradient) < 1e-5 * np.linalg.norm(gradient)


def test_primitives_one_by_one_are_an_update_bit_for_bit(tied: Model, launch: Launch, make_batch: Make) -> None:
    """Weights, metrics, inputs and state of the loss, and the order of the roles."""
    batch, index = make_batch(12), np.array_split(np.random.default_rng(0).permutation(12), 3)
    roles, options = Roles(actor=tied, critic=tied), {"micro_batch_tokens": 60, "lr": 1e-2, "schedule": "linear"}
    group = launch(1, roles, spec(value_clip=10.0, entropy_coef=0.01), **options)
    steps = [group.update(batch, [part], 4) for part in index]
    weights = group.fetch_weights(1)

    group = launch(1, roles, spec(value_clip=10.0, entropy_coef=0.01), **options)
    for i, part in enumerate(index):
        found: dict[str, float] = {}
        for role in ("actor", "critic"):
            group.forward_backward(batch.select(part), role=role, step=4, update=i, updates=3)
            found |= group.optimizer_step(role)
        told = {name: found.pop(f"actor/{name}") for name in ("step", "of_steps", "train_step", "seen")}
        assert told == {"step": i, "of_steps": 3, "train_step": 4, "seen": i}
        assert found == {name: value for name, value in steps[i].items() if name.removeprefix("actor/") not in told}
    again = group.fetch_weights(1)
    assert all(np.array_equal(array, again.tensors[name]) for name, array in weights.tensors.items())


def test_a_call_out_of_order_leaves_the_learner_whole(tied: Model, launch: Launch, make_batch: Make) -> None:
    batch = make_batch(6)
    group = launch(1, Roles(actor=tied), spec(), lr=1e-2)
    with pytest.raises(LearnerError, match="the actor has no gradient"):
        group.optimizer_step()
    group.forward_backward(batch)
    with pytest.raises(LearnerError, match="update: the gradient of actor would be lost"):
        group.update(batch, [np.arange(6)], 0)
    assert group.optimizer_step()["actor/grad_norm"] > 0


def test_a_learner_with_update_alone_trains_and_is_not_asked_for_more(
    tied: Model, launch: Launch, make_batch: Make
) -> None:
    batch, roles = make_batch(6), Roles(actor=tied)
    group = launch(1, roles, spec())
    group.start(Plugins().reference("learner", Bare), roles, spec(), 10)
    for call in (lambda: group.forward_backward(batch), lambda: group.set_learning_rate(1e-3)):
        with pytest.raises(LearnerError, match=r"the learner 'test_primitives/bare' .*rlsdk\.contracts\."):
            call()
    assert group.update(batch, [np.arange(6)], 0)["actor/grad_norm"] > 0


def test_a_gradient_that_is_not_finite_is_skipped(tied: Model, launch: Launch, make_batch: Make) -> None:
    good, bad = make_batch(6), make_batch(6, seed=1)
    bad = bad.with_tokens(advantages=np.full_like(bad.tokens["advantages"], np.inf))
    group = launch(1, Roles(actor=tied), spec(), lr=1e-2)
    before = group.checksums()
    group.forward_backward(good, good.totals + bad.totals, last=False)
    group.forward_backward(bad, good.totals + bad.totals)
    assert group.optimizer_step() == {"actor/skipped_updates": 1.0}
    assert group.checksums() == before
    group.forward_backward(good)
    assert group.optimizer_step()["actor/seen"] == 0.0


def test_the_learning_rate_is_set_by_role_follows_the_schedule_and_is_resumed(
    tied: Model, launch: Launch, make_batch: Make, tmp_path: Path
) -> None:
    batch, roles = make_batch(6), Roles(actor=tied, critic=tied)
    options = {"lr": 1e-3, "critic_lr": 1e-2, "schedule": "linear", "final_ratio": 0.5}

    def rates(group: Any, step: int) -> list[float]:
        metrics = group.update(batch, [np.arange(6)], step)
        return [metrics["actor/lr"], metrics["critic/lr"]]

    group = launch(2, roles, spec(value_clip=10.0), total=5, **options)
    assert rates(group, 0) == pytest.approx([1e-3, 1e-2])
    group.set_learning_rate(2e-3)
    assert rates(group, 1) == pytest.approx([0.9 * 2e-3, 0.9 * 1e-2])
    group.save(tmp_path / "checkpoint")
    alone, weights = rates(group, 2), group.checksums()

    group = launch(2, roles, spec(value_clip=10.0), total=5, **{**options, "critic_lr": 3e-2})
    group.load(tmp_path / "checkpoint")
    resumed = rates(group, 2)
    assert resumed[0] == alone[0] == pytest.approx(0.8 * 2e-3)
    assert resumed[1] == pytest.approx(0.8 * 3e-2)  # nobody had set it: it is that of the options
    assert group.checksums() == weights
    for wrong in (-1.0, "1e-3", None):
        with pytest.raises(LearnerError, match="expected a finite number"):
            group.set_learning_rate(wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("which", "world", "stage"), [("tied", 1, 0), ("tied", 2, 1), ("untied", 2, 2), ("tied", 2, 3), ("bfloat", 1, 1)]
)
def test_a_critic_that_warms_up_learns_as_in_an_update_and_nothing_of_the_actor_moves(
    which: str,
    world: int,
    stage: int,
    launch: Launch,
    make_batch: Make,
    tmp_path: Path,
    request: pytest.FixtureRequest,
) -> None:
    model = request.getfixturevalue(which)
    batch, index = make_batch(12), np.array_split(np.random.default_rng(0).permutation(12), 3)
    roles = Roles(actor=model, critic=model)
    options = {"zero_stage": stage, "micro_batch_tokens": 60, "lr": 1e-2, "schedule": "linear"}

    def begun() -> Any:
        return launch(world, roles, spec(value_clip=10.0), **options)

    def of(role: str, metrics: dict[str, float]) -> dict[str, float]:
        return {name: value for name, value in metrics.items() if name.startswith(role)}

    group = begun()
    together = [group.update(batch, index, step) for step in range(2)]
    group = begun()
    before = group.checksums()
    first = train_critic(group, batch, index, 0)
    assert first == pytest.approx(of("critic", together[0]), rel=1e-12)
    assert group.checksums() == before
    group.save(tmp_path / "checkpoint")
    second = train_critic(group, batch, index, 1)
    assert second == pytest.approx(of("critic", together[1]), rel=1e-12)
    third, weights = group.update(batch, index, 2), group.checksums()
    # The actor's first steps are those of a new actor: neither moments nor schedule have moved.
    assert third["actor/lr"] == together[0]["actor/lr"] and third["actor/grad_norm"] == together[0]["actor/grad_norm"]

    group = begun()
    group.load(tmp_path / "checkpoint")
    assert train_critic(group, batch, index, 1) == second
    assert group.update(batch, index, 2) == third
    assert group.checksums() == weights
