"""Tasks whose prompts are too long."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal

import attrs

from rlsdk.errors import DataError
from rlsdk.sources.listing import TaskList
from rlsdk.types import Task


@attrs.frozen(eq=False)
class _Kept:
    tasks: Sequence[Task]
    indices: tuple[int, ...]

    def __call__(self, index: int) -> Task:
        return self.tasks[self.indices[index]]


def drop_long(
    tasks: Sequence[Task], count_tokens: Callable[[Task], int], limit: int, on_long: Literal["drop", "error"] = "drop"
) -> tuple[Sequence[Task], int]:
    """Leave out tasks whose prompts have more than `limit` tokens.

    Args:
        tasks: All tasks.
        count_tokens: The length of a task's prompt.
        limit: Tokens that a prompt may have.
        on_long: Leave such tasks out, or raise.

    Returns:
        The tasks that fit, and how many do not.

    Raises:
        DataError: A prompt is too long and `on_long` is `error`; names the task.
    """
    kept = []
    for index, task in enumerate(tasks):
        length = count_tokens(task)
        if length <= limit:
            kept.append(index)
        elif on_long == "error":
            raise DataError(
                f"task {task.id!r}: its prompt has {length} tokens, more than {limit}; allow more, or drop such tasks"
            )
    return TaskList(_Kept(tasks, tuple(kept)), len(kept)), len(tasks) - len(kept)
