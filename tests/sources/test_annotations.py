"""Tasks from hand-made annotations: pairs, corrections and scores, each in its algorithm's form."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import rlsdk
from rlsdk.annotations import AnnotatedRollout, Annotation, AnnotationFile
from rlsdk.errors import DataError, OptionError

TASK = {"id": "t", "prompt": "2+3?", "answer": "5", "metadata": {"level": 1}, "source": "sums"}
TALK = (
    {"role": "assistant", "content": "6"},
    {"role": "user", "content": "no"},
    {"role": "assistant", "content": "7"},
    {"role": "user", "content": "no"},
)


def rollout(answer: Any, name: str) -> AnnotatedRollout:
    return AnnotatedRollout(id=name, number=0, index=0, answer=answer)


def write(folder: Path, *made: tuple[str, Any, str, tuple[AnnotatedRollout, ...]], task: Any = TASK) -> str:
    file = AnnotationFile(folder)
    for kind, value, by, rollouts in made:
        file.append(Annotation(kind=kind, value=value, by=by, rollouts=rollouts, task=task))  # type: ignore[arg-type]
    return str(folder)


def taken(path: str, take: str, **options: Any) -> list[rlsdk.Task]:
    return list(rlsdk.load("tasks", "annotations", path=path, take=take, **options)())


def test_a_pair_has_the_chosen_and_the_rejected_answer(tmp_path: Path) -> None:
    good, bad, third = rollout("5", "r5"), rollout("6", "r6"), rollout("7", "r7")
    path = write(
        tmp_path,
        ("pair", "second", "ann", (bad, good)),
        ("pair", "first", "bob", (good, bad)),  # shown the other way round
        ("pair", "second", "cat", (good, bad)),  # outvoted
        ("pair", "same", "ann", (bad, third)),
        ("pair", "first", "ann", (good, third)),
        ("pair", "second", "bob", (good, third)),  # one against one
        ("score", 1.0, "ann", (good,)),
    )
    [task] = taken(path, "pairs")
    assert task.metadata == {"level": 1, "chosen": "5", "rejected": "6"}
    assert (task.prompt, task.answer, task.source, task.id[:2]) == ("2+3?", "5", "sums", "t/")
    [task] = taken(path, "pairs", by=["cat"])
    assert (task.metadata["chosen"], task.metadata["rejected"]) == ("6", "5")


def test_people_who_annotated_nothing_are_answered_with_those_who_did(tmp_path: Path) -> None:
    path = write(tmp_path, ("score", 1.0, "ann", (rollout("5", "r5"),)))
    with pytest.raises(DataError, match=r"there are no annotations by bob; there are some by ann$"):
        taken(path, "scores", by=["bob"])


def test_of_one_person_the_last_word_counts(tmp_path: Path) -> None:
    good, bad = rollout("5", "r5"), rollout("6", "r6")
    path = write(tmp_path, ("pair", "first", "ann", (bad, good)), ("pair", "first", "ann", (good, bad)))
    [task] = taken(path, "pairs")
    assert task.metadata["chosen"] == "5"


def test_an_edit_is_a_demonstration_whose_earlier_turns_stay(tmp_path: Path) -> None:
    path = write(
        tmp_path,
        ("edit", "4", "ann", (rollout("6", "r6"),)),
        ("edit", "5", "ann", (rollout("6", "r6"),)),
        ("edit", "5", "bob", (rollout("6", "r6"),)),
        ("edit", "5!", "ann", (rollout(TALK, "talk"),)),
    )
    single, talk = taken(path, "edits")
    assert single.metadata["demonstration"] == "5"
    assert [message["content"] for message in talk.metadata["demonstration"]] == ["6", "no", "5!"]


def test_scores_are_demonstrations_with_a_label(tmp_path: Path) -> None:
    path = write(
        tmp_path,
        ("score", 4, "ann", (rollout("5", "r5"),)),
        ("score", 1, "bob", (rollout("5", "r5"),)),
        ("score", "bad", "ann", (rollout("6", "r6"),)),
    )
    right, wrong = taken(path, "scores", passing=2.5, labels={"bad": 0.0})
    assert (right.metadata["demonstration"], right.metadata["label"]) == ("5", True)
    assert (wrong.metadata["demonstration"], wrong.metadata["label"]) == ("6", False)
    with pytest.raises(DataError, match=r"ann scored a rollout of task 't' 'bad', a label without a value"):
        taken(path, "scores")
    with pytest.raises(OptionError, match="only scores have labels"):
        taken(path, "edits", labels={"bad": 0.0})


def test_all_annotations_of_a_task_are_in_one_split(tmp_path: Path) -> None:
    for i in range(40):
        answers = [("edit", f"{i}", by, (rollout("6", f"r{i}{by}"),)) for by in ("ann", "bob")]
        write(tmp_path, *answers, task={**TASK, "id": f"t{i}"})
    split = {
        name: {t.id.split("/")[0] for t in taken(str(tmp_path), "edits", split=name, held_out=0.3)}
        for name in ("train", "test")
    }
    assert not split["train"] & split["test"] and len(split["train"] | split["test"]) == 40
    assert 4 <= len(split["test"]) <= 20


def test_a_file_without_that_kind_says_what_it_has(tmp_path: Path) -> None:
    path = write(tmp_path, ("score", 1, "ann", (rollout("5", "r5"),)))
    with pytest.raises(
        DataError, match=r"there are no pairs for split 'train'; of 1 annotations it has 1 of kind score"
    ):
        taken(path, "pairs")
