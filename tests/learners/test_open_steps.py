"""The learner's primitives are refused out of order, or if a learner lacks them, before any rank is called."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from rlsdk.batch import Totals
from rlsdk.contracts import GivesPrimitives, Model, Roles, SetsLearningRate, TrainBatch
from rlsdk.errors import LearnerError
from rlsdk.learners.deepspeed import DeepSpeedLearner
from rlsdk.learners.rank_calls import OpenSteps

MODEL = Model(path="none")


class OnlyUpdates:
    """A learner of before there were primitives."""

    def update(self, minibatches: Any, step: int) -> dict[str, float]:
        return {}


def steps(learner: Any = None, *, critic: bool = False) -> OpenSteps:
    return OpenSteps("lab/own", learner or DeepSpeedLearner(), Roles(actor=MODEL, critic=MODEL if critic else None))


def test_deepspeed_gives_primitives_and_sets_its_learning_rate() -> None:
    assert isinstance(DeepSpeedLearner(), GivesPrimitives) and isinstance(DeepSpeedLearner(), SetsLearningRate)


def test_each_role_has_its_own_optimiser_step() -> None:
    found = steps(critic=True)
    found.add("actor", last=False)
    found.add("critic", last=True)
    found.take("critic")
    found.add("actor", last=True)
    with pytest.raises(LearnerError, match="save: the gradient of actor would be lost; call optimizer_step first"):
        found.check_none("save")
    found.take("actor")
    found.check_none("save")


def test_calls_out_of_order_say_which_comes_first() -> None:
    found = steps()
    with pytest.raises(LearnerError, match="optimizer_step: the actor has no gradient; call forward_backward first"):
        found.take("actor")
    found.add("actor", last=False)
    with pytest.raises(LearnerError, match="the actor's last batch is missing"):
        found.take("actor")
    found.add("actor", last=True)
    with pytest.raises(LearnerError, match=r"call optimizer_step\('actor'\) first, or give last=False"):
        found.add("actor", last=True)
    found.take("actor")
    with pytest.raises(LearnerError, match=r"got role 'critic'; this learner trains actor$"):
        found.add("critic", last=True)


def test_a_learner_with_only_update_is_reported() -> None:
    found = steps(OnlyUpdates())
    found.check_none("update")
    with pytest.raises(LearnerError, match=r"the learner 'lab/own' has only update; .*GivesPrimitives"):
        found.add("actor", last=True)
    with pytest.raises(LearnerError, match=r"the learner 'lab/own' has no such method \(rlsdk.contracts.SetsLearning"):
        found.check_rate(1e-3, "actor")


@pytest.mark.parametrize("lr", [-1e-3, math.nan, math.inf])
def test_a_learning_rate_is_a_finite_number_of_at_least_0(lr: float) -> None:
    steps().check_rate(0.0, "actor")
    with pytest.raises(LearnerError, match=r"got \S+ for the actor; expected a finite number of at least 0"):
        steps().check_rate(lr, "actor")


def test_totals_count_trained_tokens_and_rollouts_and_add_up() -> None:
    ones = np.ones(3, np.int64)
    batch = TrainBatch(
        token_ids=np.arange(9),
        lengths=3 * ones,
        starts=ones,
        responses=2 * ones,
        loss_mask=np.array([True, True, False, False, False, True]),
    )
    assert batch.totals == Totals(3, 2)
    assert batch.select(np.array([1])).totals == Totals(0, 0)
    assert batch.totals + batch.select(np.array([0])).totals == Totals(5, 3)
    assert batch.select(np.zeros(0, np.int64)).totals == Totals(0, 0)
