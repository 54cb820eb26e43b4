"""A run that learns nothing reports this and fails; one that has solved its tasks finishes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rlsdk.rollout.step_batch import pack
from rlsdk.trainer.summary import LearningMonitor, reason, teaches
from rlsdk.types import Group, Rollout, Score, Task

RUN = Path("runs/my run")
WRONG = {"reward/mean": 0.0, "reward/std": 0.0, "accuracy/mean": 0.0, "groups/trained": 1.0}
RIGHT = {"reward/mean": 1.0, "reward/std": 0.0, "accuracy/mean": 1.0, "groups/trained": 0.0}


def after(*steps: bool, limit: int | None = 3, metrics: dict[str, float] = WRONG) -> LearningMonitor:
    learning = LearningMonitor(limit, RUN)
    for taught in steps:
        learning.note(metrics, taught=taught)
    return learning


def test_empty_steps_in_a_row_end_the_run_and_others_between_do_not() -> None:
    assert not after(True, False, False, True, False, False).stuck
    learning = after(True, False, False, False)
    assert learning.stuck
    said = learning.fault(4)
    assert said.startswith("nothing was learned in the last 3 steps (max_empty_steps=3): every rollout earned 0;")
    assert not after(*[False] * 99, limit=None).stuck


def test_a_run_that_trained_nothing_has_failed_however_short() -> None:
    assert after(False, False).fault(2).startswith("nothing was learned in this run (2 steps): every")
    assert after(True, False, False).fault(3) == ""
    assert LearningMonitor(3, RUN).fault(0) == ""


def test_a_model_that_has_learned_to_solve_all_its_tasks_ends_well_and_early() -> None:
    learning = after(True, False, False, False, metrics=RIGHT)
    assert learning.stuck
    assert learning.fault(4) == ""
    assert "the model solves these tasks already" in learning.warning()
    assert "the model solves these tasks already" in after(False, False, False, metrics=RIGHT).fault(3)


def test_counts_come_back_from_a_checkpoint_and_one_more_step_is_taken_before_it_ends_again() -> None:
    resumed = LearningMonitor(3, RUN)
    resumed.restore(json.loads(json.dumps(after(True, False, False, False).state())))
    assert not resumed.stuck
    resumed.note(WRONG, taught=False)
    assert (resumed.taught, resumed.empty, resumed.stuck) == (1, 4, True)


SKIPPED = {**WRONG, "actor/skipped_updates": 2.0}


def test_a_resumed_run_whose_every_update_was_skipped_has_failed() -> None:
    resumed = LearningMonitor(None, RUN)
    resumed.restore(after(True, True).state())
    for _ in range(2):
        resumed.note(SKIPPED, taught=False)
    assert resumed.fault(4).startswith("nothing was learned since the run was resumed (2 steps): every update was skip")
    resumed.note({**WRONG, "actor/grad_norm": 1.0}, taught=True)
    resumed.note(SKIPPED, taught=False)  # an exception among updates that were taken
    assert resumed.fault(6) == ""


@pytest.mark.parametrize(
    ("metrics", "said"),
    [
        (RIGHT, "train on harder ones (right is a reward of at least 1"),
        ({**WRONG, "reward/mean": 0.1, "reward/std": 1e-17}, "every rollout earned 0.1"),
        ({**WRONG, "rollouts/tokens": 0.0}, "does the workflow await chat.sample()"),
        ({**WRONG, "rollouts/tokens": 0.0, "rollouts/truncated": 1.0}, "leave no room for an answer; raise model.max_"),
        (
            {**WRONG, "rollouts/truncated": 0.9},
            ", and 90% were cut off at sampling.max_tokens; `rlsdk rollouts 'runs/my run'` ",
        ),
        ({**WRONG, "rollouts/truncated": 0.9}, ", and 90% were cut off at sampling.max_tokens; `rlsdk rollouts"),
        (WRONG, "and `rlsdk diagnose 'runs/my run'` whether earlier ones were better"),
        ({**WRONG, "reward/std": 0.5, "groups/trained": 0.0}, "algorithm.filters left out every group"),
        ({**WRONG, "reward/std": 0.5}, "the rollouts of each task earned the same"),
        ({"groups/trained": 0.0}, "no rollout with a valid score"),
        ({**WRONG, "actor/skipped_updates": 2.0}, "gradient was not finite"),
    ],
)
def test_the_reason_names_what_to_change(metrics: dict[str, float], said: str) -> None:
    assert said in reason(metrics, RUN)


def test_a_step_teaches_by_advantages_or_by_what_experts_wrote() -> None:
    task = Task("t", "p")
    rollout = Rollout(task, (), [1, 2], [False, True], [0.0, -1.0], [-1, 0])
    group = Group(task, [rollout], [Score(1.0)])
    own, mixed = pack([group]), pack([group], [Group(task, [rollout], [Score(0.0)])])
    assert own is not None and mixed is not None
    assert not teaches(own, {"advantages/nonzero": 0.0})
    assert teaches(own, {"advantages/nonzero": 0.01})
    assert teaches(mixed, {"advantages/nonzero": 0.0})
    assert not teaches(own, {"advantages/nonzero": 1.0, "actor/skipped_updates": 2.0})
    assert teaches(own, {"advantages/nonzero": 1.0, "actor/skipped_updates": 1.0, "actor/grad_norm": 0.5})


def test_a_step_whose_gradient_is_zero_teaches_nothing() -> None:
    task = Task("t", "p")
    batch = pack([Group(task, [Rollout(task, (), [1, 2], [False, True], [0.0, -1.0], [-1, 0])], [Score(1.0)])])
    assert batch is not None
    metrics = {**WRONG, "reward/std": 0.5, "advantages/nonzero": 1.0, "actor/grad_norm": 0.0}
    assert not teaches(batch, metrics)
    assert "policy loss does not depend on x.logprobs" in reason(metrics, RUN)


def test_a_step_that_warms_up_the_critic_teaches_what_the_critic_learns() -> None:
    task = Task("t", "p")
    batch = pack([Group(task, [Rollout(task, (), [1, 2], [False, True], [0.0, -1.0], [-1, 0])], [Score(1.0)])])
    assert batch is not None
    learned = {"critic/grad_norm": 0.5, "critic/skipped_updates": 0.0, "advantages/nonzero": 0.0}
    assert teaches(batch, learned, "critic") and not teaches(batch, learned)
    assert not teaches(batch, {**learned, "critic/grad_norm": 0.0}, "critic")
    skipped = {"critic/skipped_updates": 1.0, "advantages/nonzero": 1.0}
    assert not teaches(batch, skipped, "critic")
    monitor = LearningMonitor(1, RUN)
    monitor.note({**WRONG, **skipped}, taught=False, role="critic")
    assert "gradient was not finite" in monitor.fault(1)
