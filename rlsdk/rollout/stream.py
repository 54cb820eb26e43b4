"""Endless, reproducible streams of the tasks of a source, in a shuffled order or one that a sampler chooses."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, TypeGuard

import attrs
import numpy as np

from rlsdk.components import calling, see_definition
from rlsdk.config import TaskSource
from rlsdk.contracts import KeepsOrder, ReportsMetrics, TaskList, TaskSampler, WeighsSource, memory_of
from rlsdk.contracts.optional import restore_state, state_of
from rlsdk.errors import DataError, RunError
from rlsdk.plugins import Plugins
from rlsdk.plurals import counted
from rlsdk.types import Group, Task


class TaskStream:
    """Endless stream of tasks. Each epoch's permutation depends only on seed and epoch, so only the position is saved.

    A `KeepsOrder` source is read in its own order in every epoch.

    Attributes:
        position: Number of tasks drawn so far, dropped ones included.
        dropped: Number of drawn tasks whose prompt exceeded the limit.
        resized: Effect on a resumed run of a changed number of tasks, for the log.
    """

    resized: ClassVar[str] = "their order differs, so this epoch repeats some tasks and skips others"

    def __init__(
        self,
        tasks: Sequence[Task],
        seed: int,
        fits: Callable[[Task], int],
        limit: int,
        on_long: str,
        *,
        setting: str = "max_prompt_tokens",
    ) -> None:
        """Create a stream.

        Args:
            tasks: Tasks of the source.
            seed: Seed of the order.
            fits: Counts the tokens of a task's prompt.
            limit: Maximum length of a prompt, in tokens.
            on_long: Treatment of longer prompts: "drop" or "error".
            setting: Setting that the limit comes from, for messages.
        """
        if not len(tasks):
            raise DataError("tasks.train: a source has no tasks")
        self._tasks, self._seed, self._count, self._limit, self._on_long = tasks, seed, fits, limit, on_long
        self._setting = setting
        self._order: tuple[int, np.ndarray] = (-1, np.empty(0, np.int64))
        self.position = 0
        self.dropped = 0

    def __len__(self) -> int:
        """Number of tasks in an epoch."""
        return len(self._tasks)

    def draw(self) -> tuple[Task, int]:
        """Return the next task whose prompt fits, and its position for `at`.

        Raises:
            DataError: A prompt is too long and `on_long` is "error", or no prompt fits.
        """
        for _ in range(len(self._tasks)):
            position = self.position
            task = self.at(position)
            self.position += 1
            if self._fits(task):
                return task, position
        raise self._none_fits()

    def _fits(self, task: Task) -> bool:
        """Return True if the prompt of a task that was drawn is short enough; count it as dropped if not.

        Raises:
            DataError: It is too long, and `on_long` is "error".
        """
        length = self._count(task)
        if length > self._limit and self._on_long == "error":
            raise DataError(
                f"task {task.id!r}: its prompt has {counted(length, 'token')}; {self._setting} allows {self._limit}"
            )
        self.dropped += length > self._limit
        return length <= self._limit

    def _none_fits(self) -> DataError:
        count, limit = len(self._tasks), self._limit
        return DataError(f"no task fits: {self._setting} allows {limit} tokens, but all {count} prompts are longer")

    def note(self, position: int, group: Group) -> None:
        """Note a group that was sampled; only a sampler reads it."""

    def repeat(self, position: int) -> None:
        """Expect another group of a task whose last one was noted but is sampled again; only a sampler reads it."""

    def learn(self) -> None:
        """Let a sampler learn from the groups noted so far."""

    def factor(self) -> float:
        """Return the factor on the weight of the source in the next batch."""
        return 1.0

    def metrics(self) -> Mapping[str, float]:
        """Return metrics of a sampler since the last call."""
        return {}

    def memory(self) -> dict[str, Any]:
        """Return the state besides the position, as plain JSON."""
        return {}

    def remember(self, memory: Mapping[str, Any]) -> None:
        """Restore from `memory()`."""

    def at(self, position: int) -> Task:
        """Return the task at a position, counted over all epochs."""
        epoch, index = divmod(position, len(self._tasks))
        if is_ordered(self._tasks):
            return self._tasks[index]
        if self._order[0] != epoch:
            self._order = (epoch, np.random.default_rng([self._seed, epoch]).permutation(len(self._tasks)))
        return self._tasks[int(self._order[1][index])]


class SampledStream(TaskStream):
    """Endless stream of tasks that a sampler chooses.

    The position of a draw is its number times the number of tasks, plus the index of its task.
    """

    resized: ClassVar[str] = "the sampler knows tasks by their index, so it may take some for others"

    def __init__(self, sampler: TaskSampler, *args: Any, **options: Any) -> None:
        """Create a stream; other arguments are those of `TaskStream`."""
        super().__init__(*args, **options)
        self._sampler = sampler
        self._open = np.ones(len(self), np.bool_)  # of prompts that are not known to be too long
        self._expected = np.zeros(len(self), np.int32)  # groups of each task that `learn` has not seen yet
        self._waiting: list[tuple[int, Group]] = []

    def draw(self) -> tuple[Task, int]:
        """Return the next task whose prompt fits, and its position for `at`.

        Raises:
            DataError: As for `TaskStream.draw`.
            RunError: The sampler chose no available task.
        """
        while self._open.any():
            idle = self._open & (self._expected == 0)
            available = np.flatnonzero(idle if idle.any() else self._open)
            position = self.position * len(self)
            with calling(self._sampler):
                given: object = self._sampler.draw(available, np.random.default_rng([self._seed, self.position]))
            if not _is_among(given, available):
                raise RunError(
                    f"rollout.sampler drew {given!r}; expected one of the {len(available)} indices that it was given, "
                    f"such as {available[0]}{see_definition(self._sampler)}"
                )
            index = int(given)
            self.position += 1
            task = self._tasks[index]
            if self._fits(task):
                self._expected[index] += 1
                return task, position + index
            self._open[index] = False
        raise self._none_fits()

    def at(self, position: int) -> Task:
        """Return the task at a position."""
        return self._tasks[position % len(self)]

    def note(self, position: int, group: Group) -> None:
        """Keep a group that was sampled, until `learn`."""
        self._waiting.append((position, group))

    def repeat(self, position: int) -> None:
        """Do not offer a task until it has been sampled again."""
        self._expected[position % len(self)] += 1

    def learn(self) -> None:
        """Give the sampler the groups since the last call, in the order of their draws."""
        waiting, self._waiting = self._waiting, []
        for position, group in sorted(waiting, key=lambda noted: noted[0]):
            index = position % len(self)
            # Checkpoints of earlier versions do not expect a second group of a task whose first one had expired.
            self._expected[index] = max(self._expected[index] - 1, 0)
            with calling(self._sampler):
                self._sampler.note(index, group)

    def factor(self) -> float:
        """Return the factor on the weight of the source in the next batch.

        Raises:
            RunError: The sampler returned none.
        """
        if not isinstance(self._sampler, WeighsSource):
            return 1.0
        with calling(self._sampler):
            given: object = self._sampler.source_weight()
        number = isinstance(given, int | float | np.number) and not isinstance(given, bool)
        if not number or not 0 <= (factor := float(given)) < np.inf:  # type: ignore[arg-type]
            raise RunError(
                f"rollout.sampler: source_weight() returned {given!r}; expected a finite number of at least 0"
                f"{see_definition(self._sampler)}"
            )
        return factor

    def metrics(self) -> Mapping[str, float]:
        """Return metrics of the sampler since the last call."""
        with calling(self._sampler):
            return self._sampler.metrics() if isinstance(self._sampler, ReportsMetrics) else {}

    def memory(self) -> dict[str, Any]:
        """Return what a resumed run needs besides the position, as plain JSON.

        Raises:
            RunError: JSON cannot hold the sampler's state.
        """
        self.learn()
        long, busy = np.flatnonzero(~self._open).tolist(), np.repeat(np.arange(len(self)), self._expected).tolist()
        return {"sampler": {"long": long, "busy": busy, "state": state_of(self._sampler)}}

    def remember(self, memory: Mapping[str, Any]) -> None:
        """Restore from `memory()`; without it, the sampler starts afresh."""
        if (then := memory.get("sampler")) is not None:
            size = len(self)
            self._open[[index for index in then["long"] if index < size]] = False
            np.add.at(self._expected, [index for index in then["busy"] if index < size], 1)
            if memory_of(self._sampler) is not None and then["state"] is not None:
                restore_state(self._sampler, then["state"])


def _is_among(given: object, available: np.ndarray) -> TypeGuard[int]:
    """Return True for one of the available indices, which are ascending."""
    if isinstance(given, bool) or not isinstance(given, int | np.integer):
        return False
    place = int(np.searchsorted(available, given))
    return place < len(available) and bool(available[place] == given)


def opened(source: TaskSource, plugins: Plugins) -> Sequence[Task]:
    """Open the tasks of a source, under the name that the config gives it, if any.

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
    """Return True if training reads these tasks in their own order instead of shuffling."""
    return isinstance(tasks, KeepsOrder) and tasks.ordered
