"""Tasks from people's annotations of rollouts, as saved by `rlsdk view`."""

from __future__ import annotations

import zlib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

import rlsdk
from rlsdk.annotations import Annotation, read_annotations
from rlsdk.contracts import TaskList
from rlsdk.errors import DataError, OptionError
from rlsdk.limits import Share
from rlsdk.types import Message, Task

_BUCKETS = 10_000


@rlsdk.tasks("annotations")
def annotated_tasks(
    *,
    path: str | tuple[str, ...],
    take: Literal["pairs", "edits", "scores"],
    passing: float = 1.0,
    labels: Mapping[str, float] | None = None,
    by: tuple[str, ...] = (),
    split: Literal["train", "test"] = "train",
    held_out: Share = 0.0,
) -> TaskList:
    """Tasks with answers that people compared, corrected or scored on the Annotate page of `rlsdk view`.

    `pairs` have `chosen` and `rejected` in their metadata, for `algorithm: {use: dpo, rollouts: demonstrations}`; pairs
    without more votes for one answer than for the other are skipped. `edits` have the corrected answer as
    `demonstration`, for `sft` or `mix`. `scores` have the answer as `demonstration` and whether it is right as `label`,
    for `algorithm: {use: kto, rollouts: demonstrations}`. The last annotation of each person counts.

    Args:
        path: A run's folder, a file `annotations.jsonl`, or a list of these.
        take: Kind of annotations: `pairs`, `edits` or `scores`.
        passing: Minimum score of a right answer, for `scores`; the scores of several people are averaged.
        labels: Value of each label, such as `{wrong: 0, right: 1}`, if scores are labels.
        by: Names of the people whose annotations are used; by default, all.
        split: `train`, or `test` for the tasks held out by `held_out`.
        held_out: Share of tasks in `test`; all annotations of a task are in one split.

    Returns:
        One task per pair, edited answer or scored answer.

    Raises:
        RunError: The file does not exist.
        DataError: The file has no annotation of that kind, or a label without a value.
    """
    if labels and take != "scores":
        raise OptionError("tasks 'annotations'", [("labels", f"only scores have labels; take is {take!r}")])
    paths = (path,) if isinstance(path, str) else path
    everyone = read_annotations(paths)
    made = [each for each in everyone if not by or each.by in by]
    if everyone and not made:
        people = ", ".join(sorted({each.by for each in everyone}))
        raise DataError(f"{', '.join(paths)}: there are no annotations by {', '.join(by)}; there are some by {people}")
    wanted = [each for each in made if _split(str(each.task.get("id")), held_out) == split]
    if take == "pairs":
        tasks = list(_pairs(wanted))
    elif take == "edits":
        tasks = list(_edits(wanted))
    else:
        tasks = list(_scored(wanted, passing, labels or {}))
    if not tasks:
        held = ", ".join(f"{count} of kind {kind}" for kind, count in Counter(a.kind for a in wanted).items()) or "none"
        raise DataError(
            f"{', '.join(paths)}: there are no {take} for split {split!r}; of {len(made)} annotations it has {held}. "
            "Annotate more rollouts in `rlsdk view`, or choose another `take`"
        )
    return TaskList(tasks.__getitem__, len(tasks))


def _split(task: str, held_out: float) -> str:
    return "test" if zlib.crc32(task.encode("utf-8", "replace")) % _BUCKETS < held_out * _BUCKETS else "train"


def _pairs(made: Sequence[Annotation]) -> Iterator[Task]:
    """Yield a task for each pair with more votes for one answer than for the other; `same` does not count."""
    votes_by_pair: dict[tuple[str, str], dict[str, tuple[Annotation, int]]] = {}
    for each in made:
        if each.kind != "pair":
            continue
        first, second = (rollout.id for rollout in each.rollouts)
        vote = {"first": first, "second": second}.get(each.value)
        low, high = sorted((first, second))
        votes_by_pair.setdefault((low, high), {})[each.by] = (each, 0 if vote is None else 1 if vote == low else -1)
    for (low, high), votes in votes_by_pair.items():
        total = sum(vote for _, vote in votes.values())
        if not total:
            continue
        annotation = next(iter(votes.values()))[0]
        answers = {rollout.id: rollout.answer for rollout in annotation.rollouts}
        chosen, rejected = (low, high) if total > 0 else (high, low)
        yield _task(annotation, f"{low[:8]}-{high[:8]}", chosen=answers[chosen], rejected=answers[rejected])


def _edits(made: Sequence[Annotation]) -> Iterator[Task]:
    """Yield a task for each corrected answer, with each person's last correction."""
    last = {(each.rollouts[0].id, each.by): each for each in made if each.kind == "edit"}
    seen = set()
    for annotation in last.values():
        [rollout] = annotation.rollouts
        if (rollout.id, annotation.value) in seen:  # two people wrote the same text
            continue
        seen.add((rollout.id, annotation.value))
        shown: Any = annotation.value
        if not isinstance(rollout.answer, str):  # messages: the text replaces the policy's last one
            own = max(i for i, message in enumerate(rollout.answer) if message["role"] == "assistant")
            shown = [*rollout.answer[:own], {"role": "assistant", "content": annotation.value}]
        yield _task(annotation, f"{rollout.id[:8]}-{annotation.id[:4]}", demonstration=shown)


def _scored(made: Sequence[Annotation], passing: float, labels: Mapping[str, float]) -> Iterator[Task]:
    last = {(each.rollouts[0].id, each.by): each for each in made if each.kind == "score"}
    values: dict[str, list[float]] = {}
    for (rollout, _), annotation in last.items():
        values.setdefault(rollout, []).append(annotation.number(labels))
    shown = {rollout: annotation for (rollout, _), annotation in last.items()}
    for rollout, annotation in shown.items():
        mean = sum(values[rollout]) / len(values[rollout])
        answer = annotation.rollouts[0].answer
        yield _task(annotation, rollout[:8], demonstration=answer, label=mean >= passing)


def _task(annotation: Annotation, name: str, **more: Any) -> Task:
    given = annotation.task
    prompt = given["prompt"]
    return Task(
        id=f"{given['id']}/{name}",
        prompt=prompt if isinstance(prompt, str) else tuple(Message.from_json(message) for message in prompt),
        answer=given["answer"],
        metadata={**given["metadata"], **more},
        source=given["source"],
    )
