"""The endless, reproducible stream of tasks that a run draws its batches from."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from rlsdk.errors import DataError
from rlsdk.types import Task


class TaskStream:
    """Each epoch is a permutation that depends on seed and epoch alone, so that a position is all there is to save.

    Attributes:
        position: Tasks drawn so far, dropped ones included.
        dropped: Of these, how many had a prompt over the limit.
    """

    def __init__(self, tasks: Sequence[Task], seed: int, fits: Callable[[Task], int], limit: int, on_long: str) -> None:
        """Make one.

        Args:
            tasks: The source.
            seed: Of the order.
            fits: Counts the tokens of a task's prompt.
            limit: Longest prompt.
            on_long: "drop" or "error".
        """
        if not len(tasks):
            raise DataError("tasks.train: the source holds no task")
        self._tasks, self._seed, self._count, self._limit, self._on_long = tasks, seed, fits, limit, on_long
        self._order: tuple[int, np.ndarray] = (-1, np.empty(0, np.int64))
        self.position = 0
        self.dropped = 0

    def take(self, count: int) -> list[Task]:
        """The next `count` tasks whose prompts fit.

        Raises:
            DataError: A prompt is too long and the run says that this is an error, or none fits.
        """
        taken: list[Task] = []
        misses = 0
        while len(taken) < count:
            task = self._at(self.position)
            self.position += 1
            length = self._count(task)
            if length <= self._limit:
                taken.append(task)
                misses = 0
                continue
            if self._on_long == "error":
                raise DataError(
                    f"task {task.id!r}: its prompt has {length} tokens, max_prompt_tokens allows {self._limit}"
                )
            self.dropped += 1
            misses += 1
            if misses >= len(self._tasks):
                raise DataError(
                    f"no task fits max_prompt_tokens={self._limit}: all {len(self._tasks)} prompts are longer"
                )
        return taken

    def _at(self, position: int) -> Task:
        epoch, index = divmod(position, len(self._tasks))
        if self._order[0] != epoch:
            self._order = (epoch, np.random.default_rng([self._seed, epoch]).permutation(len(self._tasks)))
        return self._tasks[int(self._order[1][index])]
