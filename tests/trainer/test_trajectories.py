"""One vote per trajectory: shares and means do not depend on an agent's number of conversations."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import attrs
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlsdk.errors import ScoringError
from rlsdk.evaluation.evaluation import Answers, evaluation_of
from rlsdk.scoring.outcome import check_budget, unscored
from rlsdk.trainer.metrics import raw_metrics, reward_metrics, rollout_metrics, source_metrics
from rlsdk.types import Group, Rollout, Score, Task

COUNTS = ("tokens", "tokens_total", "length", "truncated")
"""Metrics of rollouts, not of trajectories."""


def group_of(members: Sequence[tuple[str, Score, float]], conversations: Sequence[int], source: str = "") -> Group:
    """A group of trajectories, each of so many conversations; a member of one conversation has no need of a label."""
    task = Task(id="t", prompt="?", source=source)
    rollouts, scores = [], []
    for (label, score, calls), count in zip(members, conversations, strict=True):
        for step in range(count):
            rollout = Rollout(task, (), [1], [True], [-1.0], [0], metrics={"calls": calls})
            rollouts.append(attrs.evolve(rollout, trajectory=label if label or count == 1 else "unlabelled", step=step))
            scores.append(score)
    return Group(task, rollouts, scores)


def judged(value: float | None) -> Score:
    return Score.invalid("ill") if value is None else Score(value, metrics={"reward/part": value / 2})


VALUES = st.one_of(st.none(), st.floats(-1, 1))
GROUPS = st.lists(st.lists(st.tuples(VALUES, st.floats(0, 40), st.integers(1, 6)), min_size=1, max_size=5), min_size=1)


def metrics_of(groups: Sequence[Group]) -> dict[str, Any]:
    found = evaluation_of(Answers(tuple(groups[:1]), tuple(groups)), 4)
    metrics = {
        **rollout_metrics(groups),
        **reward_metrics(groups, scored=True),
        **raw_metrics(groups),
        **source_metrics(groups, scored=True),
        **found.metrics,
        "rollouts/invalid": check_budget(groups, 1.0, 1),
        "share": sum(len(unscored(g)) for g in groups) / sum(len(g.trajectories) for g in groups),
    }
    return {name: value for name, value in metrics.items() if name.rpartition("/")[2] not in COUNTS}


@settings(max_examples=60, deadline=None)
@given(GROUPS)
def test_splitting_a_trajectory_into_conversations_changes_no_metric(drawn: Any) -> None:
    def build(count: Callable[[int], int]) -> list[Group]:
        return [
            group_of(
                [(f"{g}/{i}", judged(value), calls) for i, (value, calls, _) in enumerate(members)],
                [count(k) for _, _, k in members],
                source="ab"[g % 2],
            )
            for g, members in enumerate(drawn)
        ]

    whole, split = metrics_of(build(lambda _: 1)), metrics_of(build(lambda k: k))
    assert split.keys() == whole.keys()
    for name, value in whole.items():
        assert split[name] == (None if value is None else pytest.approx(value, abs=1e-9)), name


def test_metrics_of_rewards_are_logged_and_replace_none_of_the_runs_own() -> None:
    scores = [Score(1.0, metrics={"format": 1.0, "reward/part": 1.0}), Score(0.0, metrics={"format": 0.0})]
    odd = Score(0.5, metrics={"reward/mean": 9.0, "reward/std": 9.0})
    found = reward_metrics([group_of([("", score, 0.0) for score in [*scores, odd]], [1, 1, 1])], scored=True)
    assert (found["score/format"], found["reward/part"]) == (0.5, 1.0)
    assert (found["reward/mean"], found["reward/std"]) == (0.5, pytest.approx(0.408, abs=1e-3))


def test_half_of_the_trajectories_fail_however_much_the_others_talk() -> None:
    members = [("", Score.invalid("ill"), 1.0)] * 8 + [(f"g/{i}", Score(1.0), 32.0) for i in range(8)]
    group = group_of(members, [1] * 8 + [32] * 8)
    with pytest.raises(ScoringError, match=r"step 3: 8 of 16 trajectories could not be scored"):
        check_budget([group], 0.2, 3)
    answers = Answers((), (group,))
    with pytest.raises(ScoringError, match=r"8 of 16 trajectories"):
        answers.check_scores(0.2, "evaluation")
    assert rollout_metrics([group])["workflow/calls"] == 16.5
    assert evaluation_of(answers, 16).metrics["eval/workflow/calls"] == 16.5


def test_reasons_of_several_tasks_add_up() -> None:
    tasks = [Task(id=f"it's {i}", prompt="?") for i in range(3)]
    scores = [Score.invalid(f"workflow failed: task {task.id!r}: 188 tokens leave no room") for task in tasks]
    groups = [Group(t, [Rollout.from_text(t, "x")], [s]) for t, s in zip(tasks, scores, strict=True)]
    assert {reason for group in groups for reason in unscored(group)} == {"workflow failed: 188 tokens leave no room"}
    with pytest.raises(ScoringError, match=r"task \"it's 0\" and 2 more: workflow failed: 188 tokens"):
        check_budget(groups, 0.5, 1)


def test_reasons_of_several_seeds_of_an_environment_add_up() -> None:
    tasks = [Task(id=f"seed-{i}", prompt="?") for i in range(3)]
    failed = "workflow failed: RuntimeError: environment 'lab/maze'{}: reset raised OSError: no simulator"
    scores = [Score.invalid(failed.format(f" (seed {i})")) for i in range(3)]
    groups = [Group(t, [Rollout.from_text(t, "x")], [s]) for t, s in zip(tasks, scores, strict=True)]
    assert {reason for group in groups for reason in unscored(group)} == {failed.format("")}
