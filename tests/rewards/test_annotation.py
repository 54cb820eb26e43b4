"""The reward `annotation` returns a person's score of the same rollout, and invents none."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import rlsdk
from rlsdk.annotations import Annotation, AnnotationFile, annotated, task_json
from rlsdk.errors import DataError, RlsdkError
from rlsdk.types import Rollout, Task

TASK = Task("t", "2+3?", "5")


def answer(text: str, task: Task = TASK) -> Rollout:
    return Rollout.from_text(task, text)


def score(folder: Path, text: str, value: Any, by: str = "ann") -> None:
    rollout = answer(text)
    seen = annotated(rollout, 0, 0)
    AnnotationFile(folder).append(
        Annotation(kind="score", value=value, by=by, rollouts=(seen,), task=task_json(rollout))
    )


def test_a_scored_rollout_has_the_mean_of_each_ones_last_score(tmp_path: Path) -> None:
    for text, value, by in (("5", 1, "ann"), ("5", 4, "ann"), ("5", 2, "bob"), ("6", -1, "ann")):
        score(tmp_path, text, value, by)
    five, six, other, elsewhere = rlsdk.load("reward", "annotation", path=str(tmp_path))(
        [answer("5"), answer("6"), answer("7"), answer("5", Task("u", "2+3?", "5"))]
    )
    assert (five.value, five.metrics, five.reason) == (3.0, {"annotated": 1.0, "annotators": 2.0}, "ann: 4, bob: 2")
    assert six.value == -1.0
    assert not other.valid and not elsewhere.valid
    assert other.reason.startswith("no one has scored this rollout")


def test_without_a_persons_score_the_default_counts_with_a_reason(tmp_path: Path) -> None:
    [found] = rlsdk.load("reward", "annotation", path=str(tmp_path), default=0.5)([answer("5")])
    assert (found.valid, found.value, found.metrics["annotated"]) == (True, 0.5, 0.0)


def test_a_score_that_is_given_while_the_reward_is_in_use_counts_from_then_on(tmp_path: Path) -> None:
    reward: Any = rlsdk.load("reward", "annotation", path=str(tmp_path))
    assert not reward([answer("5")])[0].valid
    score(tmp_path, "5", 2)
    assert reward([answer("5")])[0].value == 2.0
    AnnotationFile(tmp_path).undo("ann")
    assert not reward([answer("5")])[0].valid


def test_labels_need_a_value_and_people_can_be_chosen(tmp_path: Path) -> None:
    score(tmp_path, "5", "right")
    score(tmp_path, "5", "wrong", "bob")
    labels = {"right": 1.0, "wrong": 0.0}
    assert rlsdk.load("reward", "annotation", path=str(tmp_path), labels=labels)([answer("5")])[0].value == 0.5
    only: Any = rlsdk.load("reward", "annotation", path=str(tmp_path), labels=labels, by=["ann"])
    assert only([answer("5")])[0].value == 1.0
    with pytest.raises(DataError, match=r"add it to `labels`, such as \{right: 1\}"):
        rlsdk.load("reward", "annotation", path=str(tmp_path))([answer("5")])
    with pytest.raises(RlsdkError, match="default and labels must be finite"):
        rlsdk.load("reward", "annotation", path=str(tmp_path), default=1e19)
