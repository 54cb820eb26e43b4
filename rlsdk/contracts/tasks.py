"""Task sources: a sequence that creates tasks on access, an optional interface, and the label of a task."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Protocol, overload, runtime_checkable

import attrs

from rlsdk.errors import DataError
from rlsdk.plurals import counted
from rlsdk.types import Task


@attrs.frozen(eq=False)
class TaskList(Sequence[Task]):
    """Sequence of tasks that are created on access: its size costs no memory; picklable if `make` is.

    Attributes:
        make: Returns the task at an index from 0 to `size - 1`, the same each time.
        size: Number of tasks.
        skipped: Reasons why rows were skipped, one line each.
        ordered: True if training keeps this order instead of shuffling.
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
        return f"TaskList({counted(self.size, 'task')})"


@runtime_checkable
class KeepsOrder(Protocol):
    """Optional interface of a task source that declares whether training keeps its order."""

    @property
    def ordered(self) -> bool:
        """True if training keeps the order of the tasks in every epoch; False if it shuffles them."""
        ...


def label_of(task: Task) -> bool:
    """Return whether a task's demonstration is right, according to the `label` in its metadata.

    Raises:
        DataError: The metadata has no such label.
    """
    label = task.metadata.get("label")
    if isinstance(label, bool):
        return label
    raise DataError(
        f"task {task.id!r}: nothing says whether its demonstration is right; expected `label`, true or false, in its "
        f"metadata, got {label!r}: map a column to 'label'"
    )
