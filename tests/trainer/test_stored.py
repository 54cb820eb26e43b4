"""Data that a training stores for viewers: tokens with the learner's numbers, evaluations, the ledger by step."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import pytest
import sqlalchemy as sa
from rich.console import Console

from rlsdk.contracts import TrainBatch
from rlsdk.contracts.rollouts import Evaluation, TakenBatch, UnscoredEvaluationError
from rlsdk.errors import ScoringError
from rlsdk.runlog.metrics import read_ledger
from rlsdk.runlog.query import query, reader
from rlsdk.runlog.serialization import decode, decode_learned
from rlsdk.runlog.store import Address, RolloutStore
from rlsdk.runlog.tables import GROUPS
from rlsdk.trainer.callbacks import standard_callbacks
from rlsdk.types import Score
from tests.trainer.fakes import SOURCE, FakeLearner, ScriptedRollouts
from tests.trainer.test_trainer import Told, make_trainer


class EvaluatedRollouts(ScriptedRollouts):
    """Rollouts whose evaluations have answers."""

    async def evaluate(self) -> Evaluation:
        taken = await super().take(-1)
        groups = tuple(record.group for record in taken.records if record.group is not None)
        found = await super().evaluate()
        return attrs.evolve(found, greedy=groups, sampled=groups)


class DistantLearner(FakeLearner):
    """A learner whose logprobs are not the scripted policy's."""

    def forward(self, batch: TrainBatch, fields: Sequence[str]) -> dict[str, np.ndarray]:
        return {name: values / 2 for name, values in super().forward(batch, fields).items()}


def trained(folder: Path, rollouts: type[ScriptedRollouts] = EvaluatedRollouts, **changes: Any) -> Path:
    trainer = make_trainer(folder, **{"steps": 2, "save_rollouts": 1, **changes})
    trainer.rollouts, trainer.learner = rollouts(trainer.plan), DistantLearner()
    trainer.plan.folder.mkdir(parents=True)
    store = RolloutStore(Address.make(trainer.plan.folder, None, None))
    trainer.callbacks = standard_callbacks(Console(quiet=True), Told(), store)  # type: ignore[arg-type]
    try:
        trainer.train()
    finally:
        store.close()
    return Path(trainer.plan.folder)


def payloads(folder: Path, step: int) -> list[bytes]:
    address = Address.of(folder)
    assert address
    of_step = sa.select(GROUPS.c.payload).where((GROUPS.c.step == step) & (GROUPS.c.number >= 0))
    with reader(address).connect() as connection:
        return [row[0] for row in connection.execute(of_step)]


def test_trained_groups_keep_advantages_and_logprobs_of_the_learner(tmp_path: Path) -> None:
    folder = trained(tmp_path)
    for payload in payloads(folder, 1):
        group, learned = decode(payload), decode_learned(payload)
        mask = group.rollouts[1].loss_mask
        first, second = learned["advantages"]
        assert first is not None and second is not None
        # Rewards 0 and 1: their mean is 0.5 and their unbiased deviation √½.
        np.testing.assert_allclose(second[mask], np.sqrt(0.5), atol=1e-4)
        np.testing.assert_allclose(first[mask], -np.sqrt(0.5), atol=1e-4)
        assert not second[~mask].any()
        own = learned["learner_logprobs"][0]
        assert own is not None and (own[mask] == -0.25).all()


def test_logprobs_that_are_the_engines_are_not_stored_twice(tmp_path: Path) -> None:
    folder = trained(tmp_path, old_logprobs="rollout")
    assert {name for payload in payloads(folder, 1) for name in decode_learned(payload)} == {"advantages"}


def test_evaluations_are_stored_with_their_step(tmp_path: Path) -> None:
    folder = trained(tmp_path)
    kept = query(folder, evaluations=True)
    assert {(row["step"], row["state"]) for row in kept} == {
        (step, state) for step in (0, 2) for state in ("eval greedy", "eval sampled")
    }
    assert all(row["number"] >= 0 for row in query(folder))


def test_the_ledger_is_written_after_each_step(tmp_path: Path) -> None:
    rows = read_ledger(trained(tmp_path))
    assert [(row["step"], row["sources"][SOURCE]["trained"]) for row in rows] == [(1, 2), (2, 4)]


class JudgelessRollouts(ScriptedRollouts):
    """Rollouts of which one in each group cannot be scored from the second step on."""

    async def take(self, version: int) -> TakenBatch:
        taken = await super().take(version)
        for record in taken.records if version else ():
            assert record.group is not None
            record.group = attrs.evolve(record.group, scores=[Score(1.0), Score.invalid("the judge is down")])
        return taken


def test_the_step_that_ends_a_run_since_too_few_rollouts_could_be_scored_is_stored(tmp_path: Path) -> None:
    with pytest.raises(ScoringError, match="step 2: 2 of 4 trajectories could not be scored"):
        trained(tmp_path, rollouts=JudgelessRollouts, save_rollouts=5)
    found = [(row["step"], row["valid"], row["reason"]) for row in query(tmp_path / "run")]
    assert found == 2 * [(2, 1, ""), (2, 0, "the judge is down")]


class JudgelessEvaluations(EvaluatedRollouts):
    """Rollouts whose evaluations cannot be scored."""

    async def evaluate(self) -> Evaluation:
        found = await super().evaluate()
        none = [Score.invalid("the judge is down")] * 2
        groups = tuple(attrs.evolve(group, scores=none) for group in found.sampled)
        raise UnscoredEvaluationError("evaluation: 4 of 4 …", attrs.evolve(found, greedy=(), sampled=groups))


@pytest.mark.parametrize(("section", "step"), [({"before": True}, 0), ({"before": False, "after": True}, 2)])
def test_the_evaluation_that_ends_a_run_since_too_few_answers_could_be_scored_is_stored(
    tmp_path: Path, section: dict[str, bool], step: int
) -> None:
    with pytest.raises(ScoringError, match="evaluation: 4 of 4"):
        trained(tmp_path, rollouts=JudgelessEvaluations, eval=section)
    found = query(tmp_path / "run", evaluations=True)
    assert [(row["step"], row["state"], row["reason"]) for row in found] == 4 * [
        (step, "eval sampled", "the judge is down")
    ]
