"""Rewards that run in an actor are called by their convention, and what they raise is the reason of a score."""

from __future__ import annotations

import asyncio
from functools import partial
from pathlib import Path

import pytest

import rlsdk
from rlsdk.contracts import RewardSpec, ScoringLimits
from rlsdk.errors import DataError
from rlsdk.plugins import Plugins
from rlsdk.scoring.actors import RewardActor
from rlsdk.scoring.scorer import RewardTerm, Scorer

LAB = """
import rlsdk
from rlsdk.errors import DataError

@rlsdk.reward("one", runs="actor")
def one(rollout):
    if not rollout.task.prompt:
        raise DataError("no prompt")
    return 1 / len(rollout.text)

@rlsdk.reward("several", batch=True, runs="actor")
def several(rollouts):
    import numpy
    return numpy.array([1 / len(rollout.text) for rollout in rollouts])

@rlsdk.reward("group", batch="group", runs="actor")
def group(rollouts):
    return [1 / len(rollout.text) for rollout in rollouts]
"""
REASON = "ZeroDivisionError: division by zero ("


@pytest.fixture
def plugins(tmp_path: Path) -> Plugins:
    (tmp_path / "lab.py").write_text(LAB)
    return Plugins([tmp_path / "lab.py"])


def rollouts(*texts: str) -> list[rlsdk.Rollout]:
    return [rlsdk.Rollout.from_text(rlsdk.Task(id="t", prompt="?"), text) for text in texts]


@pytest.mark.parametrize(
    ("name", "values"), [("one", [1.0, None, 0.5]), ("several", [1.0, None, 0.5]), ("group", None)]
)
def test_a_reward_in_an_actor_is_called_by_its_convention(
    plugins: Plugins, name: str, values: list[float | None] | None
) -> None:
    actor = RewardActor(plugins.reference("reward", f"lab/{name}"), "")
    assert [score.value for score in actor.score(rollouts("a", "bb"))] == [1.0, 0.5]
    scores = actor.score(rollouts("a", "", "bb"))
    assert [score.value if score.valid else None for score in scores] == (values or [None] * 3)
    assert all(score.reason.startswith(REASON) for score in scores if not score.valid)


@pytest.mark.stack
def test_what_an_actor_raises_is_reported_without_rays_traceback(plugins: Plugins, cluster: None) -> None:
    from rlsdk.cluster.actors import kill, spawn
    from rlsdk.scoring.actors import score_in_actor

    reference = plugins.reference("reward", "lab/one")
    actor = spawn(RewardActor, reference, "")
    term = RewardTerm(RewardSpec("lab/one"), plugins.resolve(reference), reference)
    scorer = Scorer([term], ScoringLimits(timeout=60.0, workers=1), actor=lambda term: partial(score_in_actor, actor))
    try:
        bad, good = asyncio.run(scorer.score_group(rollouts("", "bb")))
        assert (bad.valid, good.value) == (False, 0.5)
        assert bad.reason.startswith(f"lab/one: {REASON}") and "lab.py, line 9)" in bad.reason
        with pytest.raises(DataError, match=r"^no prompt$"):
            asyncio.run(scorer.score(rlsdk.Rollout.from_text(rlsdk.Task(id="t", prompt=""), "a")))
    finally:
        scorer.close()
        kill(actor)
