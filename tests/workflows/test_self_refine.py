"""An answer, a critique of it, and another answer."""

from __future__ import annotations

from typing import Any

import pytest

import rlsdk
from rlsdk.errors import OptionError
from rlsdk.testing import run_workflow
from rlsdk.types import Message, Rollout, Task
from tests.rollout.codecs import chatml

TASK = Task(id="t", prompt=[Message("user", "1+1?")])


def refined(*answers: str, max_length: int = 9000, **options: Any) -> Rollout:
    said = iter(answers)
    workflow = rlsdk.load("workflow", "self_refine", **options)
    [group] = run_workflow(workflow, [TASK], chatml(), lambda _: next(said), max_length=max_length)
    return group.rollouts[0]


def test_each_round_is_a_critique_and_an_answer_and_all_are_trained_on() -> None:
    rollout = refined("3", "too much", "1", "too little", "2", rounds=2, critique="Wrong?", refine="Again:")
    said = [m.content for m in rollout.messages]
    assert said == ["1+1?", "3", "Wrong?", "too much", "Again:", "1", "Wrong?", "too little", "Again:", "2"]
    assert rollout.text == "2"
    assert rollout.status == "finished"
    assert int(rollout.loss_mask.sum()) == sum(len(a) + 1 for a in ("3", "too much", "1", "too little", "2"))


def test_without_a_critique_the_new_answer_is_asked_for_at_once() -> None:
    rollout = refined("3", "2", critique="", refine="Again:")
    assert [m.content for m in rollout.messages] == ["1+1?", "3", "Again:", "2"]


def test_a_conversation_that_fills_the_model_is_truncated() -> None:
    rollout = refined("3", "no", max_length=60, critique="Wrong?", refine="Again, with all your reasons:")
    assert rollout.status == "truncated"
    assert rollout.text == "no"


@pytest.mark.parametrize("options", [{"rounds": 0}, {"refine": ""}, {"max_tokens": 0}, {"timeout": 0.0}])
def test_options_that_make_no_sense(options: dict[str, Any]) -> None:
    with pytest.raises(OptionError):
        rlsdk.load("workflow", "self_refine", **options)
