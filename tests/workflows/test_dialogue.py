"""Feedback until the answer is right, with scripted policies."""

from __future__ import annotations

import pytest

import rlsdk
from rlsdk.contracts import RewardSpec
from rlsdk.errors import OptionError
from rlsdk.scoring.scorer import RewardTerm, Scorer
from rlsdk.testing import run_workflow
from rlsdk.types import Group, Rollout, Score, Task
from tests.rollout.codecs import plain

TASK = Task(id="a", prompt="3,5,17>9:", answer={"target": 9, "numbers": [3, 5, 17]})
RIGHT, WRONG = "<answer>17-5-3</answer>", "<answer>17+5</answer>"


def talk(*answers: str, reward: object = "countdown", max_length: int = 512, **options: object) -> Group:
    said = iter(answers)
    scorer = Scorer([RewardTerm(RewardSpec("r"), rlsdk.load("reward", reward))])
    workflow = rlsdk.load("workflow", "dialogue", **{"feedback": "=", **options})
    [group] = run_workflow(workflow, [TASK], plain(), lambda _: next(said), scorer=scorer, max_length=max_length)
    return group


def test_it_ends_with_the_first_right_answer() -> None:
    group = talk(WRONG, RIGHT, turns=5)
    [rollout], [score] = group.rollouts, group.scores
    assert [m.content for m in rollout.messages] == ["3,5,17>9:", WRONG, "=", RIGHT]
    assert plain().decode([rollout.token_ids]) == [f"3,5,17>9:{WRONG}\n={RIGHT}"]
    assert rollout.metrics == {"turns": 2, "tokens": 6 + 8, "right_at_first": 0.0, "right": 1.0}
    assert (score.value, rollout.status) == (1.0, "finished")


def test_it_ends_after_so_many_turns_without_a_last_feedback() -> None:
    group = talk(WRONG, WRONG, turns=2)
    [rollout] = group.rollouts
    assert [m.role for m in rollout.messages] == ["user", "assistant", "user", "assistant"]
    assert rollout.metrics["right"] == 0.0 and group.scores[0].value < 1


def test_the_feedback_may_hold_the_reason() -> None:
    @rlsdk.reward("says")
    def says(rollout: Rollout) -> Score:
        return Score(0.75, reason="1 < 2")

    assert talk("1", "2", reward=says, turns=2, feedback="({reason})").rollouts[0].messages[2].content == "(1 < 2)"
    assert talk("1", reward=says, enough=0.75).rollouts[0].metrics["right_at_first"] == 1.0


def test_a_reward_that_fails_ends_it_as_an_invalid_score() -> None:
    @rlsdk.reward("fails")
    def fails(rollout: Rollout) -> float:
        raise OSError("no disk")

    group = talk("1", reward=fails)
    assert len(group.rollouts[0].messages) == 2
    assert not group.scores[0].valid and "no disk" in group.scores[0].reason


def test_without_room_it_is_truncated() -> None:
    [rollout] = talk(WRONG, RIGHT, max_length=16).rollouts
    assert rollout.status == "truncated" and rollout.metrics["turns"] == 1
    with pytest.raises(OptionError, match="turns: expected int >= 1, got 0"):
        talk(turns=0)
    with pytest.raises(OptionError, match="timeout: expected float > 0 or null, got 0"):
        talk(timeout=0)
