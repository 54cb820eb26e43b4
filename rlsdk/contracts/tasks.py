"""Task sources, and how the parts of a reward are combined."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol, overload, runtime_checkable

import attrs

from rlsdk.components import Batch, component_of
from rlsdk.errors import DataError, ValueFault
from rlsdk.plurals import counted
from rlsdk.types import Group, Score, Task

if TYPE_CHECKING:
    import numpy as np

    from rlsdk.plugins.fingerprints import Fingerprint


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


class TaskSampler(Protocol):
    """Contract of the kind `sampler`: chooses the next tasks of a source. Each source has its own instance.

    A sampler with `state()` and `restore(state)`, in plain JSON, keeps its memory in checkpoints (`HasMemory`).
    """

    def draw(self, available: np.ndarray, random: np.random.Generator) -> int:
        """Return the index of the next task.

        Args:
            available: Indices of the tasks to choose from, ascending int64 `[k]`, k at least 1: those whose prompts
                are not known to be too long and that have no rollouts in progress, if there are any.
            random: Generator whose seed depends on the run's seed, the source and the number of tasks drawn, so that a
                resumed run draws the same.
        """
        ...

    def note(self, index: int, group: Group) -> None:
        """Learn from a group of rollouts of a task that was drawn.

        Groups are noted before the next batch is taken, in the order of their draws, those that filters drop included.

        Args:
            index: Index of the task.
            group: Its rollouts and scores.
        """
        ...


@runtime_checkable
class WeighsSource(Protocol):
    """Optional interface of a sampler that changes the share of its source in the batches."""

    def source_weight(self) -> float:
        """Return the factor by which the source's `weight` in the config is multiplied, finite and at least 0.

        It is read before each batch, after `note`. If the product is 0 for every source, the weights of the config
        apply.
        """
        ...


@runtime_checkable
class ReportsMetrics(Protocol):
    """Optional interface of a sampler, a shaping or an advantage that reports metrics."""

    def metrics(self) -> Mapping[str, float]:
        """Return metrics since the last call, which a run logs at every step.

        Those of a sampler are logged as `sampler/NAME`, with several sources as `sampler/SOURCE/NAME`; those of a
        shaping or an advantage as `shaping/COMPONENT/NAME` and `advantage/COMPONENT/NAME`.
        """
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


@runtime_checkable
class WholeGroups(Protocol):
    """Optional interface of a reward marked `batch=True` whose options decide whether it needs whole groups."""

    @property
    def whole_groups(self) -> bool:
        """True if each call needs all rollouts of one task, as with `batch="group"`."""
        ...


@runtime_checkable
class ReadsToolObjects(Protocol):
    """Optional interface of a reward that may read the objects of a workflow that `KeepsToolObjects`."""

    @property
    def reads_tool_objects(self) -> bool:
        """True if it scores only rollouts that have such an object."""
        ...


@runtime_checkable
class HasTimeout(Protocol):
    """Optional interface of a reward that limits its own calls, such as requests to a server."""

    @property
    def timeout(self) -> float:
        """Seconds after which the reward itself ends a call; rlsdk waits at least one second longer."""
        ...


@runtime_checkable
class LimitsCalls(Protocol):
    """Optional interface of an async reward that is called a limited number of times at once, to spare a server."""

    @property
    def max_concurrency(self) -> int:
        """Maximum number of concurrent calls; the others wait, and their time limit starts when they begin."""
        ...


@runtime_checkable
class UsesGPUs(Protocol):
    """Optional interface of a reward that runs in a separate actor and may use GPUs."""

    @property
    def gpus(self) -> float:
        """GPUs of the actor; fractions are allowed."""
        ...


@runtime_checkable
class DrivesOtherCode(Protocol):
    """Optional interface of a reward that calls code from outside its plugin."""

    @property
    def marks(self) -> Mapping[str, Fingerprint]:
        """Name -> fingerprint of that code; a run is not resumed if it changed."""
        ...


def batch_of(reward: Any) -> Batch:
    """Return what a reward is called with: one rollout (False), a list of rollouts (True), or a whole "group".

    Args:
        reward: Ready to run.
    """
    component = component_of(reward)
    if component is None or not component.batch:
        return False
    return "group" if isinstance(reward, WholeGroups) and reward.whole_groups else component.batch


def failed_together(reason: str, count: int) -> list[Score]:
    """Return the invalid scores of rollouts of a task that were scored in one call, which failed."""
    note = f"; the call was for all {count} rollouts of the task, so none of them has a score" if count > 1 else ""
    return [Score.invalid(reason + note)] * count


STATISTICS = ("mean", "std", "min", "max")
"""Statistics of the whole reward, logged as `reward/STATISTIC`; parts of it have other names."""


@attrs.frozen
class RewardSpec:
    """One part of a reward, and how it is combined with the others.

    Attributes:
        name: Name in metrics, as resolved.
        weight: Weight in the sum.
        gate: Threshold: if the value is below it, later parts are not scored and count as 0.
        multiply: Multiply the sum by the value instead of adding it.
        range: (low, high) of the values, mapped to 0 and 1 before weighting; values outside are clipped.
        sources: Task sources that the part applies to; empty means all.
        metric: Name in metrics, as given; empty for the component's name, with a number if an earlier part has it.
    """

    name: str = ""
    weight: float = 1.0
    gate: float | None = None
    multiply: bool = False
    range: tuple[float, float] | None = None
    sources: tuple[str, ...] = ()
    metric: str = ""

    def __attrs_post_init__(self) -> None:
        if self.metric and (re.fullmatch(r"[\w.-]+", self.metric) is None or self.metric in STATISTICS):
            raise ValueFault(
                f"metric: a name of letters, digits, `_`, `-` and `.`, except those of the whole reward's metrics, "
                f"{', '.join(STATISTICS)}; got {self.metric!r}"
            )
        if self.range is not None and self.range[0] == self.range[1]:
            raise ValueFault(f"range: two different values, (low, high); got {self.range}")
        if self.multiply and self.weight != 1.0:
            raise ValueFault(f"weight: a factor has none (multiply is true); got {self.weight:g}")

    def applies(self, task: Task) -> bool:
        """Return True if the part applies to a task."""
        return not self.sources or task.source in self.sources

    def shuts(self, score: Score) -> bool:
        """Return True if this part's score is below its gate, so that later parts are not scored."""
        return self.gate is not None and score.valid and score.value < self.gate

    def mapped(self, value: float) -> float:
        """Return a value after mapping by `range`, before weighting."""
        if self.range is None:
            return value
        low, high = self.range
        return min(max((value - low) / (high - low), 0.0), 1.0)


@attrs.frozen(kw_only=True)
class ScoringLimits:
    """Resource limits of rewards.

    Attributes:
        workers: Processes in the pool that runs rewards; 0: one per core.
        timeout: Wall-clock seconds for one call; a reward with its own, longer `timeout` gets one second more than
            that.
        memory: MiB that a pool process may allocate beyond its initial size (Linux); mapped files do not count.
        trial: Before the run starts, let rewards score made-up answers to a task; a reward that can score none is
            refused.
    """

    workers: int = 0
    timeout: float = 10.0
    memory: int = 2048
    trial: bool = True
