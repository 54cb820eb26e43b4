"""The file of annotations: an entry is valid until it is retracted, also after a crash."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlsdk.annotations import (
    ANNOTATIONS,
    AnnotatedRollout,
    Annotation,
    AnnotationFile,
    annotated,
    read_annotations,
    rollout_id,
    task_json,
)
from rlsdk.errors import RunError, ValueFault
from rlsdk.types import Message, Rollout, Task

TASK = {"id": "t", "prompt": "2+3?", "answer": "5", "metadata": {}, "source": "sums"}


def scored(value: float | str = 1.0, by: str = "ann", rollout: str = "r0") -> Annotation:
    seen = AnnotatedRollout(id=rollout, number=0, index=0, answer="5")
    return Annotation(kind="score", value=value, by=by, rollouts=(seen,), task=TASK)


def test_an_annotation_is_the_same_after_it_was_read(tmp_path: Path) -> None:
    made = scored("half \ud800 right")
    AnnotationFile(tmp_path).append(made)
    [line] = (tmp_path / ANNOTATIONS).read_text().splitlines()
    assert {"id", "time", "by", "kind", "value", "rollouts", "task"} == set(json.loads(line))
    assert AnnotationFile(tmp_path).read() == (made,)


def test_the_last_annotation_of_a_person_is_taken_back_and_stays_in_the_file(tmp_path: Path) -> None:
    file = AnnotationFile(tmp_path)
    first, second, others = scored(1), scored(2), scored(3, by="bob")
    for each in (first, second, others):
        file.append(each)
    assert file.undo("ann") == second
    assert file.read() == (first, others)
    assert file.undo("ann") == first
    assert file.undo("ann") is None
    assert AnnotationFile(tmp_path).read() == (others,)
    assert len((tmp_path / ANNOTATIONS).read_text().splitlines()) == 5


STEP = st.one_of(
    st.tuples(st.just("append"), st.sampled_from("ab")),
    st.tuples(st.just("undo"), st.sampled_from("ab")),
    st.tuples(st.just("tear"), st.integers(1, 60)),
    st.tuples(st.just("reopen"), st.none()),
)


@settings(max_examples=60, deadline=None)
@given(st.lists(STEP, max_size=20))
def test_valid_annotations_are_those_appended_and_not_retracted(steps: list[tuple[str, str | int | None]]) -> None:
    """A torn line, the beginning of an annotation, is left out, and costs none of those before and after it."""
    with tempfile.TemporaryDirectory() as name:
        file, standing = AnnotationFile(Path(name)), []
        for what, value in steps:
            if what == "append":
                standing.append(scored(len(standing), by=str(value)))
                file.append(standing[-1])
            elif what == "undo":
                last = next((each for each in reversed(standing) if each.by == value), None)
                assert file.undo(str(value)) == last
                standing = [each for each in standing if each is not last]
            elif what == "tear":
                with (Path(name) / ANNOTATIONS).open("a") as torn:
                    torn.write(json.dumps(scored().as_json())[: int(str(value))])
            else:
                file = AnnotationFile(Path(name))
            assert file.read() == tuple(standing)
        assert AnnotationFile(Path(name)).read() == tuple(standing)


def test_a_file_that_was_replaced_by_a_shorter_one_is_read_again(tmp_path: Path) -> None:
    file = AnnotationFile(tmp_path)
    file.append(scored(1))
    file.append(scored(2))
    assert len(file.read()) == 2
    (tmp_path / ANNOTATIONS).unlink()
    assert file.read() == ()
    file.append(last := scored(3))
    assert file.read() == (last,)


@pytest.mark.parametrize(
    ("kind", "value", "message"),
    [
        ("rank", "first", "kind is 'rank'; expected one of pair, score"),
        ("pair", "first", "pair: 1 rollout given; expected 2"),
        ("score", float("nan"), "score: value is nan; expected a finite number or a label"),
        ("score", True, "expected a finite number"),
        ("score", " ", "expected a finite number or a label"),
        ("edit", "", "expected a text that is not empty"),
        ("skip", "all", "expected the kind of question"),
    ],
)
def test_a_wrong_annotation_is_refused(kind: str, value: object, message: str) -> None:
    with pytest.raises(ValueFault, match=message):
        Annotation(kind=kind, value=value, by="ann", rollouts=scored().rollouts, task=TASK)  # type: ignore[arg-type]


def test_a_run_without_annotations_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RunError, match=r"there are no annotations; expected a run's folder"):
        read_annotations([str(tmp_path)])


def test_a_rollout_is_known_by_its_task_and_conversation() -> None:
    task = Task("t", "2+3?", "5")
    ids = [rollout_id(Rollout.from_text(task, text)) for text in ("5", "5", "6")]
    assert ids[0] == ids[1] != ids[2]
    assert rollout_id(Rollout.from_text(Task("u", "2+3?", "5"), "5")) != ids[0]


def test_a_prefill_belongs_to_the_prompt_and_what_the_policy_saw_first_does_too() -> None:
    task = Task("t", [Message("user", "2+3?"), Message("assistant", "<answer>")], 5, metadata={"odd": object(), "n": 1})
    rollout = Rollout.from_text(task, "5</answer>")
    found, kept = task_json(rollout), annotated(rollout, 3, 1)
    assert [message["content"] for message in found["prompt"]] == ["2+3?", "<answer>"]
    assert (found["answer"], found["metadata"], kept.answer) == (5, {"n": 1}, "5</answer>")
    made = Annotation(kind="score", value=1, by="ann", rollouts=(kept,), task=found)
    assert made.response(0) == rollout.response == "<answer>5</answer>"
    shown = [
        Message("user", "2+3?\nThe board is empty."),
        Message("assistant", "a"),
        Message("user", "on"),
        Message("assistant", "b"),
    ]
    played = Rollout(Task("g", "2+3?"), shown, (), (), (), ())
    assert task_json(played)["prompt"] == [{"role": "user", "content": "2+3?\nThe board is empty."}]
    assert [message["content"] for message in annotated(played, 0, 0).answer] == ["a", "on", "b"]  # type: ignore[index]
