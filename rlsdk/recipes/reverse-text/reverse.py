"""Words to write backwards, and how much of one was written backwards: `abc>` asks for `cba`."""

from __future__ import annotations

import hashlib
from functools import partial
from random import Random
from typing import Literal

import rlsdk
from rlsdk.kit import TaskList, pick

LETTERS = "abcdefghijklmnopqrstuvwxyz"


@rlsdk.tasks("words")
def words(
    *,
    split: Literal["train", "test"] = "train",
    size: int = 20_000,
    lengths: tuple[int, int] = (2, 8),
    seed: int = 0,
    demonstrations: Literal["right", "shuffled", "same"] | None = None,
) -> TaskList:
    """Random words to write backwards; a hash decides whether a word is for training or for tests.

    Args:
        split: `train`, or `test` (a tenth of all words).
        size: Number of tasks.
        lengths: Letters of the shortest and of the longest word.
        seed: Random seed of the words.
        demonstrations: Give each task an answer to imitate: the right one, its letters in random order, or the word
            as it is.
    """
    return TaskList(partial(_task, split, lengths, seed, demonstrations), size)


def _task(split: str, lengths: tuple[int, int], seed: int, demonstrations: str | None, index: int) -> rlsdk.Task:
    random = Random(f"{seed}/{split}/{index}")
    length = lengths[0] + pick(random, lengths[1] - lengths[0] + 1)
    word = ""
    while not word or is_test(word) != (split == "test"):
        word = "".join(LETTERS[pick(random, len(LETTERS))] for _ in range(length))
    shown = {"right": word[::-1], "shuffled": "".join(sorted(word, key=lambda _: random.random())), "same": word}
    metadata = {"demonstration": shown[demonstrations]} if demonstrations else {}
    return rlsdk.Task(id=f"reverse/{split}/{index}", prompt=f"{word}>", answer=word[::-1], metadata=metadata)


def is_test(word: str) -> bool:
    """Return True if a word is held out for tests."""
    return hashlib.md5(word.encode(), usedforsecurity=False).digest()[0] % 10 == 0


@rlsdk.reward("places", cache=True)
def places(rollout: rlsdk.Rollout) -> rlsdk.Score:
    """Share of the letters that stand in their place; only the whole word is right."""
    wanted, given = str(rollout.task.answer), rollout.response
    same = sum(a == b for a, b in zip(wanted, given, strict=False))
    return rlsdk.Score(same / max(len(wanted), len(given)), metrics={"correct": float(given == wanted)})
