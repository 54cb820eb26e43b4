"""A plugin of rlsdk in one file."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from random import Random
from typing import Literal

import rlsdk
from rlsdk.kit import TaskList
from rlsdk.limits import Count


@rlsdk.tasks("my_tasks")
def my_tasks(
    *, split: Literal["train", "test"] = "train", size: Count = 1000, largest: Count = 40
) -> Sequence[rlsdk.Task]:
    """Sums of two numbers.

    Args:
        split: `train` or `test`; their tasks differ.
        size: Number of tasks.
        largest: Greatest number to add.
    """
    return TaskList(partial(_task, split, largest), size)


def _task(split: str, largest: int, index: int) -> rlsdk.Task:
    """Make the task at an index from nothing but the index, so that every process makes the same."""
    random = Random(f"{split} {index}")
    first, second = random.randint(0, largest), random.randint(0, largest)
    return rlsdk.Task(f"{split}:{index}", f"{first}+{second}=", answer=f"{first + second}")
