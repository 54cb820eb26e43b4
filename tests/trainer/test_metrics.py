"""Metrics of a step about how far rollouts ran ahead, and the time saved."""

from __future__ import annotations

import attrs
import numpy as np
import pytest

from rlsdk.contracts.rollouts import TaskStatus
from rlsdk.rollout.staleness import StalenessPolicy
from rlsdk.rollout.task_ledger import TaskLedger
from rlsdk.trainer.metrics import (
    explained_variance,
    reward_metrics,
    rollout_metrics,
    skipped_updates,
    staleness_metrics,
)
from rlsdk.types import Group, Rollout, Score, Task


def test_the_ages_of_trained_tokens_are_counted() -> None:
    versions = np.array([5, 5, 4, 2])
    assert staleness_metrics(versions, 5, spread=False) == {"staleness/max": 3.0}
    found = staleness_metrics(versions, 5, spread=True)
    assert found["staleness/mean"] == 1.0
    assert {k: v for k, v in found.items() if "share" in k} == {
        "staleness/share_0": 0.5,
        "staleness/share_1": 0.25,
        "staleness/share_3": 0.25,
    }


def test_tokens_that_are_too_old_to_be_trained_on_count_as_sampled() -> None:
    task = Task("t", "p")
    late = Rollout(task, (), range(6), [False, *[True] * 5], [0.0] * 6, [-1, 0, 0, 0, 4, 4])
    group = Group(task, [late], [Score(1.0)])
    trimmed = StalenessPolicy(token_limit=2).trimmed(group, 4)
    assert trimmed.rollouts[0].loss_mask.tolist() == [False] * 4 + [True] * 2
    for each in (group, trimmed):
        found = rollout_metrics([each])
        assert (found["rollouts/tokens"], found["rollouts/length"]) == (5.0, 5.0)


def test_the_terms_of_a_reward_are_told_with_their_spread_if_there_are_several() -> None:
    def group(*scores: Score) -> Group:
        task = Task("t", "p")
        return Group(task, [Rollout(task, (), [1, 2], [False, True], [0.0, -1.0], [-1, 0])] * len(scores), scores)

    parts = [{"reward/right": right, "reward/format": form} for right, form in ((1.0, 0.5), (0.0, 0.5), (0.5, 0.5))]
    found = reward_metrics([group(*(Score(sum(each.values()), metrics=each) for each in parts))], scored=True)
    assert (found["reward/min"], found["reward/max"]) == (0.5, 1.5)
    assert [found[f"reward_{end}/right"] for end in ("min", "max", "std")] == pytest.approx([0, 1, (1 / 6) ** 0.5])
    assert [found[f"reward_{end}/format"] for end in ("min", "max", "std")] == [0.5, 0.5, 0]
    alone = reward_metrics([group(Score(1.0, metrics={"reward/right": 1.0}))], scored=True)
    assert not any(name.startswith("reward_") for name in alone)


def test_lengths_of_prompts_and_rollouts_are_told_with_their_extremes() -> None:
    task = Task("t", "p")
    short = Rollout(task, (), range(5), [False, False, True, True, False], [0.0] * 5, [-1, -1, 0, 0, -1])
    long = Rollout(task, (), range(7), [False, *[True] * 6], [0.0] * 7, [-1] + [0] * 6, status="truncated")
    none = Rollout(task, (), range(3), [False] * 3, [0.0] * 3, [-1] * 3)
    found = rollout_metrics([Group(task, [short, long, none], [Score(1.0)] * 3)])
    assert (found["rollouts/length_min"], found["rollouts/length"], found["rollouts/length_max"]) == (0.0, 8 / 3, 6.0)
    assert (found["rollouts/length_complete"], found["rollouts/truncated"]) == (1.0, 1 / 3)
    assert (found["rollouts/prompt_length"], found["rollouts/prompt_length_max"]) == (1.5, 2.0)  # of those with tokens
    cut = rollout_metrics([Group(task, [long], [Score(1.0)])])
    assert "rollouts/length_complete" not in cut
    unsampled = rollout_metrics([Group(task, [none], [Score(1.0)])])
    assert not {"rollouts/prompt_length", "rollouts/prompt_length_max"} & unsampled.keys()


def test_the_critic_explains_a_share_of_the_returns() -> None:
    returns = np.array([0.0, 0.0, 1.0, 1.0], np.float32)

    def share(values: list[float]) -> float:
        return explained_variance(np.array(values, np.float32), returns)["critic/explained_variance"]

    assert share([0.0, 0.0, 1.0, 1.0]) == 1.0
    assert share([0.5] * 4) == 0.0
    assert share([0.25, 0.25, 0.75, 0.75]) == 0.75  # 1 - 0.0625 / 0.25
    assert share([1.0, 1.0, 0.0, 0.0]) == -3.0
    assert explained_variance(returns, np.ones(4, np.float32)) == {}


def test_skipped_updates_are_counted_by_role() -> None:
    metrics = {"actor/skipped_updates": 2.0, "critic/skipped_updates": 0.0, "actor/loss": 1.0}
    assert skipped_updates(metrics) == {"actor": 2}
    assert skipped_updates({}) == {}


@pytest.mark.parametrize(
    "ways", [(TaskStatus.EXPIRED,), (TaskStatus.EXPIRED, TaskStatus.RUNNING, TaskStatus.COMPLETED, TaskStatus.TRAINED)]
)
def test_tokens_of_what_is_never_trained_are_waste(ways: tuple[TaskStatus, ...]) -> None:
    ledger = TaskLedger(["a"])
    task = Task(id=1, prompt="x")
    rollout = Rollout(task, (), [1, 1, 1], [False, True, True], [0.0, -1.0, -1.0], [-1, 0, 0])
    group = Group(task, (rollout, rollout), (Score(1.0), Score(0.0)))
    record = ledger.issue("a", task)
    ledger.move(record, TaskStatus.RUNNING)
    ledger.move(record, TaskStatus.COMPLETED, group)
    for way in ways:
        if way is TaskStatus.TRAINED:
            ledger.take(record)
        ledger.move(record, way, group if way is TaskStatus.COMPLETED else None)
    assert ledger.wasted == 4  # once: what was trained in the end is none
    assert ledger.counts("a").expired == 1
    other = ledger.issue("a", task)
    ledger.move(other, TaskStatus.RUNNING)
    ledger.move(other, TaskStatus.FILTERED, group)
    assert ledger.wasted == 8
    assert other.group is None  # nobody needs it any more
    half = attrs.evolve(group, rollouts=[attrs.evolve(r, loss_mask=[False, True, False]) for r in group.rollouts])
    resumed = ledger.issue("a", task)
    for to, made in ((TaskStatus.ABORTED, half), (TaskStatus.FILTERED, group)):
        ledger.move(resumed, TaskStatus.RUNNING)
        ledger.move(resumed, to, made)
    assert ledger.wasted == 12  # the whole answers, not the halves that an earlier attempt had of them
