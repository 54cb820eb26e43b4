"""KTO on a real learner: right answers become likelier and wrong ones less likely, whatever their groups."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import rlsdk
from rlsdk.components import component_of
from rlsdk.contracts import LossSpec, Model, Roles
from rlsdk.plugins import Plugins
from rlsdk.rollout.step_batch import StepBatch, labels, pack
from rlsdk.trainer.credit import CreditAssigner
from rlsdk.types import Group, Rollout, Score, Task

pytestmark = pytest.mark.stack
SIZE, LENGTH, UPDATES = 4, 6, 5


def packed_groups(rewards: list[list[float]]) -> StepBatch:
    """Groups with these rewards, of random answers to random prompts."""
    rng = np.random.default_rng(0)
    groups = []
    for number, values in enumerate(rewards):
        task, prompt = Task(id=f"t{number}", prompt="p"), rng.integers(0, 61, 3)
        rollouts = [
            Rollout(
                task,
                (),
                np.concatenate([prompt, rng.integers(0, 61, LENGTH)]),
                [False] * 3 + [True] * LENGTH,
                np.zeros(3 + LENGTH),
                [-1] * 3 + [0] * LENGTH,
            )
            for _ in values
        ]
        groups.append(Group(task, rollouts, [Score(value) for value in values]))
    packed = pack(groups)
    assert packed is not None
    return packed


def gains(launch: Callable[..., Any], model: Model, packed: StepBatch) -> np.ndarray:
    """Change of each answer's logprob by a few updates of the algorithm `kto`, in nats."""
    algorithm, plugins = rlsdk.load("algorithm", "kto"), Plugins()
    use = algorithm.policy_loss
    loss = LossSpec(policy_loss=plugins.reference("policy_loss", use.name, use.options), aggregate=algorithm.aggregate)
    learner = launch(1, Roles(actor=model, reference=model), loss, lr=1e-3, schedule="constant", warmup_steps=0)
    before = learner.logprobs(packed.arrays, "reference", ["logprobs"])["logprobs"]
    advantage = rlsdk.load("advantage", algorithm.advantage.name, **algorithm.advantage.options)
    batch = CreditAssigner([], advantage).assign(packed).arrays
    needs = frozenset(component_of(plugins.resolve(loss.policy_loss)).needs)  # type: ignore[union-attr]
    marks = labels(packed, needs, passing=algorithm.passing)
    batch = batch.with_tokens(old_logprobs=before, ref_logprobs=before).with_rollouts(**marks)
    learner.update(batch, [np.arange(len(batch))] * UPDATES, 0)
    after = learner.logprobs(packed.arrays, "actor", ["logprobs"])["logprobs"]
    change: np.ndarray = (after - before).reshape(-1, LENGTH).sum(1)
    return change


def test_right_answers_of_groups_that_are_all_right_become_likelier(launch: Callable[..., Any], tied: Model) -> None:
    assert (gains(launch, tied, packed_groups([[1.0] * SIZE] * 4)) > 0).all()


def test_right_answers_rise_and_wrong_ones_fall_wherever_they_stand(launch: Callable[..., Any], tied: Model) -> None:
    rewards = [[1.0] * SIZE, [0.0] * SIZE, [1.0, 1.0, 1.0, 0.0], [0.9, 0.0, 0.0, 0.5]]
    found, right = gains(launch, tied, packed_groups(rewards)), np.concatenate(rewards) == 1.0
    assert found[right].mean() > 0.1 > -0.1 > found[~right].mean()
    assert (found[right] > 0).mean() > 0.8 and (found[~right] < 0).mean() > 0.8
