"""Sources of tasks: a sequence whose tasks are created on access, an optional interface, and a task's label."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Protocol, overload, runtime_checkable

import attrs

from rlsdk.errors import DataError
from rlsdk.types import Task


@attrs.frozen(eq=False)
class TaskList(Sequence[Task]):
    """Sized, indexable and picklable (if `make` is); nothing is kept, so that size costs no memory.

    Attributes:
        make: Gives the task at an index from 0 to `size - 1`, the same each time.
        size: Number of tasks.
        skipped: Why rows that could not be used were left out, one line each.
        ordered: A training takes the tasks in this order, not shuffled.
    """

    make: Callable[[int], Task]
    size: int
    skipped: tuple[str, ...] = ()
    ordered: bool = False

    def __len__(self) -> int:
        return self.size

    @overload
    def __getitem__(self, index: int) -> Task: ...

    @overload
    def __getitem__(self, index: slice) -> list[Task]: ...

    def __getitem__(self, index: int | slice) -> Task | list[Task]:
        if isinstance(index, slice):
            return [self.make(i) for i in range(*index.indices(self.size))]
        if not -self.size <= index < self.size:
            raise IndexError(f"task {index} of {self.size}")
        return self.make(index % self.size)

    def __iter__(self) -> Iterator[Task]:
        return map(self.make, range(self.size))

    def __repr__(self) -> str:
        return f"TaskList({self.size} tasks)"


@runtime_checkable
class KeepsOrder(Protocol):
    """Optional interface of a source of tasks that says whether training keeps its order."""

    @property
    def ordered(self) -> bool:
        """True if training takes the tasks in their own order, in every epoch; False if it shuffles them."""
        ...


def label_of(task: Task) -> bool:
    """Return True if a task's demonstration is right, False if it is wrong, as its metadata says.

    Raises:
        DataError: The metadata does not say.
    """
    label = task.metadata.get("label")
    if isinstance(label, bool):
        return label
    raise DataError(
        f"task {task.id!r}: nothing says whether its demonstration is right; expected `label`, true or false, in its "
        f"metadata, got {label!r}: map a column to 'label'"
    )
