"""Score answers with the scorer of the task's dataset."""

from __future__ import annotations

import copy
import math
import reprlib
from collections.abc import Mapping
from typing import Any

import rlsdk
from rlsdk.errors import DataError, ValueFault
from rlsdk.types import Rollout, Score, Task
from rlsdk_reasoning_gym import datasets as gym
from rlsdk_reasoning_gym.answers import refused
from rlsdk_reasoning_gym.datasets import Spec


@rlsdk.reward("score", cache=True, imports=("reasoning_gym",))
def score(rollout: Rollout, *, tag: str | None = "answer", partial: bool = True) -> Score:
    """Score an answer with its dataset's scorer, usually from 0 to 1.

    If several answers are right, most scorers check the answer itself instead of comparing it with the dataset's. Some
    give partial credit: by default, the score of a text that contains the right answer is the right answer's share of
    its characters, which a policy may learn to exploit.

    A few scorers evaluate the answer with Python or sympy. They do not get answers other than data or plain arithmetic,
    which count as no answer. If a scorer raises, the score is 0 if the right answer can be scored, else invalid.

    Args:
        rollout: Rollout of a task from `reasoning_gym/tasks`.
        tag: Tag whose last closed pair contains the answer; null to use the policy's whole text.
        partial: Keep scores between 0 and 1; if false, scores below 1 become 0.

    Returns:
        A score with the metrics `correct` (the score is 1) and `answered` (there was an answer), 0 or 1.

    Raises:
        DataError: `reasoning_gym/tasks` did not create the task, or did so with another version of reasoning-gym.
    """
    spec, entry = _entry(rollout.task)
    answer = rollout.response if tag is None else last_tag(rollout.response, tag)
    reason = "" if answer is not None else f"there is no <{tag}> … </{tag}>"
    reason = reason or refused(spec.name, answer or "", entry)
    try:
        value = _value(spec, None if reason else answer, entry)
    except Exception as error:  # noqa: BLE001 - a scorer that fails on an answer
        cause = f"{spec.name}: {type(error).__name__}: {error}"
        if reason or not _scores_its_own(spec, entry):
            return Score.invalid(f"the scorer failed: {cause}")
        value, reason = 0.0, f"the scorer could not read the answer: {cause}"
    if not math.isfinite(value):
        return Score.invalid(f"{spec.name}: the scorer returned {value}")
    correct = value >= 1
    value = value if partial or correct else 0.0
    metrics = {"correct": float(correct), "answered": float(answer is not None)}
    return Score(value, metrics=metrics, reason=reason)


def last_tag(text: str, tag: str) -> str | None:
    """Return the content of the last closed pair of a tag, stripped; None if there is no pair."""
    opening, closing = f"<{tag}>", f"</{tag}>"
    end = text.rfind(closing)
    start = text.rfind(opening, 0, end) if end >= 0 else -1
    return text[start + len(opening) : end].strip() if start >= 0 else None


def _value(spec: Spec, answer: str | None, entry: Mapping[str, Any]) -> float:
    """Score an answer with a copy of the entry, since scorers may modify it."""
    with gym.undisturbed(f"{spec}"):
        return float(gym.dataset(spec).score_answer(answer, copy.deepcopy(dict(entry))))


def _scores_its_own(spec: Spec, entry: Mapping[str, Any]) -> bool:
    """Return True if the scorer can score the right answer, so that a failure is due to the given answer."""
    try:
        return math.isfinite(_value(spec, entry["answer"], entry))
    except Exception:  # noqa: BLE001 - any exception means that the scorer is broken
        return False


def _entry(task: Task) -> tuple[Spec, dict[str, Any]]:
    """Return the dataset that scores a task, and the task's original entry."""
    held = task.metadata
    made = held.get("made")
    if not isinstance(made, Mapping) or not isinstance(held.get("dataset"), str):
        there = ", ".join(held) or "nothing"
        raise DataError(
            f"task {task.id!r}: reasoning_gym/score needs the metadata dataset and made, which reasoning_gym/tasks "
            f"sets; it has: {there}. For other tasks, use {{use: foreign, style: reasoning_gym}}"
        )
    name, config = held["dataset"], made.get("config", {})
    try:
        if made.get("exact"):
            entry = {"question": held.get("question", ""), "answer": task.answer, "metadata": held.get("metadata", {})}
            scorer = Spec.of(name, config)
            gym.dataset(scorer)
            return scorer, entry
        spec = Spec.of(name, config, made["seed"], made["size"])
        entry = gym.entry(spec, made["index"])
    except (ValueFault, KeyError) as error:
        raise DataError(f"task {task.id!r}: {error}") from error
    if entry["answer"] != task.answer:
        raise DataError(
            f"task {task.id!r}: this version of reasoning-gym creates a different task, with the answer "
            f"{reprlib.repr(entry['answer'])} instead of {reprlib.repr(task.answer)}; create the tasks again"
        )
    return spec, entry
