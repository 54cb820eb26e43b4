"""The endless, reproducible streams of tasks that a run draws its batches from."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import attrs
import numpy as np

from rlsdk.config import TaskSource
from rlsdk.errors import DataError
from rlsdk.plugins import Plugins
from rlsdk.sources.listing import TaskList
from rlsdk.types import Task


class TaskStream:
    """Each epoch is a permutation that depends on seed and epoch alone, so that a position is all there is to save.

    A source with a true attribute `ordered` is taken in its own order, in every epoch.

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
            raise DataError("tasks.train: a source holds no task")
        self._tasks, self._seed, self._count, self._limit, self._on_long = tasks, seed, fits, limit, on_long
        self._order: tuple[int, np.ndarray] = (-1, np.empty(0, np.int64))
        self.position = 0
        self.dropped = 0

    def draw(self) -> tuple[Task, int]:
        """The next task whose prompt fits, and its position, by which `at` finds it again.

        Raises:
            DataError: A prompt is too long and the run says that this is an error, or none fits.
        """
        for _ in range(len(self._tasks)):
            position = self.position
            task = self.at(position)
            self.position += 1
            length = self._count(task)
            if length <= self._limit:
                return task, position
            if self._on_long == "error":
                raise DataError(
                    f"task {task.id!r}: its prompt has {length} tokens, max_prompt_tokens allows {self._limit}"
                )
            self.dropped += 1
        raise DataError(f"no task fits max_prompt_tokens={self._limit}: all {len(self._tasks)} prompts are longer")

    def at(self, position: int) -> Task:
        """The task at a position, counted over all epochs."""
        epoch, index = divmod(position, len(self._tasks))
        if is_ordered(self._tasks):
            return self._tasks[index]
        if self._order[0] != epoch:
            self._order = (epoch, np.random.default_rng([self._seed, epoch]).permutation(len(self._tasks)))
        return self._tasks[int(self._order[1][index])]


def opened(source: TaskSource, plugins: Plugins) -> Sequence[Task]:
    """The tasks of a source, under its name if the config gives one.

    Raises:
        DataError: The source cannot be read.
    """
    made = plugins.resolve(source.reference)
    tasks: Sequence[Task] = made() if callable(made) else made  # a source is a function, or a class of sequences
    if not source.renamed:
        return tasks
    renamed = TaskList(lambda i: attrs.evolve(tasks[i], source=source.name), len(tasks))
    return attrs.evolve(renamed, ordered=is_ordered(tasks))


def is_ordered(tasks: Sequence[Task]) -> bool:
    """Whether a training takes these tasks in their own order, not shuffled."""
    return bool(getattr(tasks, "ordered", False))


class Allocator:
    """Divides batches among sources by their weights: largest remainder, what a source did not get carried over.

    After any number of batches each source is about one task from its share, however small that is: without the carry,
    weights of 0.05 and 0.95 would give a batch of eight none of the first, for ever.
    """

    def __init__(self, weights: Sequence[float]) -> None:
        """Make one.

        Args:
            weights: At least 0, one above.
        """
        total = sum(weights)
        self._shares = [weight / total for weight in weights]
        self.carry = [0.0] * len(weights)

    def divide(self, count: int) -> list[int]:
        """How many of the next `count` tasks each source gives.

        Args:
            count: Of the batch.
        """
        due = [share * count + carried for share, carried in zip(self._shares, self.carry, strict=True)]
        parts = [max(0, int(each)) for each in due]
        by_remainder = sorted(range(len(due)), key=lambda i: (parts[i] - due[i], i))
        while sum(parts) > count:  # carried-over tasks alone can be more than a small batch
            parts[next(i for i in reversed(by_remainder) if parts[i])] -= 1
        for i in by_remainder[: count - sum(parts)]:
            parts[i] += 1
        self.carry = [each - part for each, part in zip(due, parts, strict=True)]
        return parts


@attrs.frozen(eq=False)
class Source:
    """A stream, and its part in every batch.

    Attributes:
        name: As the config calls it; part of checkpoints.
        weight: Against those of the other sources.
        stream: Of its tasks.
    """

    name: str
    weight: float
    stream: TaskStream


class TaskStreams:
    """Several streams, and what each gives to a batch."""

    def __init__(self, sources: Sequence[Source]) -> None:
        """Make one.

        Args:
            sources: With names that differ.
        """
        self._sources = {source.name: source for source in sources}
        self._allocator = Allocator([source.weight for source in sources])

    @property
    def names(self) -> list[str]:
        """Of the sources."""
        return list(self._sources)

    @property
    def dropped(self) -> int:
        """Tasks whose prompts were over the limit, of all sources."""
        return sum(source.stream.dropped for source in self._sources.values())

    def divide(self, count: int) -> dict[str, int]:
        """How many of the next `count` tasks each source gives."""
        return dict(zip(self._sources, self._allocator.divide(count), strict=True))

    def draw(self, source: str) -> tuple[Task, int]:
        """The next task of a source, and its position.

        Raises:
            DataError: A prompt is too long and the run says that this is an error, or none of the source fits.
        """
        return self._sources[source].stream.draw()

    def at(self, source: str, position: int) -> Task:
        """A task that was drawn before."""
        return self._sources[source].stream.at(position)

    def state(self) -> dict[str, Any]:
        """Where every source stands, as plain JSON."""
        return {
            name: {"position": source.stream.position, "dropped": source.stream.dropped, "carry": carry}
            for (name, source), carry in zip(self._sources.items(), self._allocator.carry, strict=True)
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from `state()`; a source that was not there then begins at its start.

        Args:
            state: By name.
        """
        for i, (name, source) in enumerate(self._sources.items()):
            then = state.get(name)
            if then is not None:
                source.stream.position, source.stream.dropped = then["position"], then["dropped"]
                self._allocator.carry[i] = then["carry"]
