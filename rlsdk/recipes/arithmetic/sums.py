"""Sums to work out, `3+4+5=`, and how near an answer comes to one."""

from __future__ import annotations

import hashlib
import re
from functools import partial
from random import Random
from typing import Literal

import rlsdk
from rlsdk.kit import TaskList, pick

LARGEST = 9


@rlsdk.tasks("sums")
def sums(
    *,
    split: Literal["train", "test"] = "train",
    size: int = 20_000,
    terms: tuple[int, int] = (2, 5),
    seed: int = 0,
    demonstrations: Literal["right", "random"] | None = None,
) -> TaskList:
    """Sums of numbers from 1 to 9; a hash of the sorted terms decides whether a sum is for training or for tests.

    Args:
        split: `train`, or `test` (a tenth of all).
        size: Number of tasks.
        terms: Least and greatest number of terms.
        seed: Random seed of the tasks.
        demonstrations: Give each task an answer to imitate: the right one, or any number that a sum of so many terms
            can have.
    """
    return TaskList(partial(_task, split, terms, seed, demonstrations), size)


def _task(split: str, terms: tuple[int, int], seed: int, demonstrations: str | None, index: int) -> rlsdk.Task:
    random = Random(f"{seed}/{split}/{index}")
    count = terms[0] + pick(random, terms[1] - terms[0] + 1)
    numbers: list[int] = []
    while not numbers or is_test(numbers) != (split == "test"):
        numbers = [1 + pick(random, LARGEST) for _ in range(count)]
    shown = {"right": str(sum(numbers)), "random": str(count + pick(random, count * LARGEST - count + 1))}
    metadata = {"demonstration": shown[demonstrations]} if demonstrations else {}
    prompt = "+".join(map(str, numbers)) + "="
    return rlsdk.Task(id=f"sums/{split}/{index}", prompt=prompt, answer=sum(numbers), metadata=metadata)


def is_test(numbers: list[int]) -> bool:
    """Return True if a sum of these numbers is held out for tests."""
    return hashlib.md5(f"{sorted(numbers)}".encode(), usedforsecurity=False).digest()[0] % 10 == 0


@rlsdk.reward("near", cache=True)
def near(rollout: rlsdk.Rollout, *, consolation: float = 0.5, within: int = 10) -> rlsdk.Score:
    """1 for the right number; less than `consolation` for another, the less the farther it is off.

    Args:
        rollout: What to score.
        consolation: Reward of an answer that is all but right.
        within: Distance from which there is no reward.
    """
    if not re.fullmatch(r"\d{1,4}", rollout.response, re.ASCII):
        return rlsdk.Score(0.0, metrics={"correct": 0.0}, reason="not a number")
    off = abs(int(rollout.response) - int(rollout.task.answer))
    value = 1.0 if off == 0 else consolation * max(0.0, 1 - off / within)
    return rlsdk.Score(value, metrics={"correct": float(off == 0)})
