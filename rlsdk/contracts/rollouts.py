"""Interface of the source of a trainer's rollouts, and the values exchanged with it.

Three things implement `Rollouts`: `rlsdk.trainer.explorer.Explorer` in the trainer's own process, the proxy of an
explorer that runs as another program, and, in tests, a script. All values are plain, so that they can travel.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import StrEnum
from typing import TYPE_CHECKING, Any, Protocol

import attrs

if TYPE_CHECKING:
    import numpy as np

    from rlsdk.types import Group, Task


class TaskStatus(StrEnum):
    """Status of a task that was issued, and of the group that is sampled for it."""

    INIT = "init"
    RUNNING = "running"
    COMPLETED = "completed"
    ABORTED = "aborted"
    EXPIRED = "expired"
    FILTERED = "filtered"
    FAILED = "failed"
    TRAINED = "trained"


@attrs.define(eq=False)
class TaskRecord:
    """A task that was issued and has not ended.

    Attributes:
        number: Position in the order of issue.
        source: Name of the source of the task.
        task: The task.
        position: Position in the stream of the source, which a checkpoint keeps of an unfinished task.
        state: Current status; changed by `TaskLedger.move` alone.
        group: Sampled group, once completed; for an aborted task that runs again, the part sampled so far. Dropped when
            no longer needed.
        attempts: Number of times it was started.
        taken: True once the trainer has the group; only its final status is open then.
        baseline: Reward of the greedy answer to the task, where it is read and could be scored.
    """

    number: int
    source: str
    task: Task
    position: int = 0
    state: TaskStatus = TaskStatus.INIT
    group: Group | None = None
    attempts: int = 0
    taken: bool = False
    baseline: float | None = None


@attrs.frozen
class TaskCounts:
    """Counts of one source since the run began.

    Attributes:
        target: Groups that the trainer has requested.
        consumed: Groups that the trainer took, whatever their final status.
        available: Groups ready for the trainer.
        scheduled: Tasks that are running.
        waiting: Tasks that are issued, were aborted or have expired; they are started before fresh ones.
        trained: Groups that were trained.
        filtered: Groups that a filter dropped.
        failed: Tasks without a group that could be trained on.
        expired: Groups that were too old once they could be trained on: their tasks are sampled again or, with a
            negative `tail`, count as filtered, too.
    """

    target: int = 0
    consumed: int = 0
    available: int = 0
    scheduled: int = 0
    waiting: int = 0
    trained: int = 0
    filtered: int = 0
    failed: int = 0
    expired: int = 0

    @property
    def gap(self) -> int:
        """Number of requested groups that are neither taken nor available."""
        return max(0, self.target - self.consumed - self.available)


@attrs.frozen
class Evaluation:
    """Result of an evaluation.

    A figure is None if none of its scores is valid: a reward that failed does not count as zero.

    Attributes:
        accuracy: `greedy`, `sampled`, and `pass@k` for each k asked for, over the answers with a valid score.
        metrics: The same, the mean rewards, the number of unscored trajectories (`eval/invalid`), and the
            workflow's metrics in sampled answers, under `eval/`; with several sources also per source, `eval/SOURCE/`.
        samples: A few sampled answers, for a person.
        greedy: Groups of one greedy answer, to be stored.
        sampled: Groups of the sampled answers.
    """

    accuracy: dict[str, float | None]
    metrics: dict[str, float | None]
    samples: tuple[dict[str, Any], ...]
    greedy: tuple[Group, ...] = ()
    sampled: tuple[Group, ...] = ()


@attrs.frozen(kw_only=True, eq=False)
class TakenBatch:
    """The groups of one training step, as the trainer takes them.

    Attributes:
        records: Records of the tasks, each with its group.
        greedy: Number of a record -> reward of the greedy answer to its task, where it is read and could be scored.
        experts: Demonstrations of the same tasks, for algorithms that mix them in.
        metrics: Metrics of the sampling.
    """

    records: tuple[TaskRecord, ...]
    greedy: Mapping[int, float] = attrs.field(factory=dict)
    experts: tuple[Group, ...] = ()
    metrics: Mapping[str, float] = attrs.field(factory=dict)

    @property
    def groups(self) -> list[Group]:
        """Groups of the records."""
        return [record.group for record in self.records if record.group is not None]


@attrs.frozen
class RolloutCounters:
    """Counts since the run began; they never decrease.

    Attributes:
        clock: Seconds inside the engines, decode steps and tokens, as `EngineGroup.clock` gives them.
        wasted: Tokens that were sampled and never trained on.
    """

    clock: Mapping[str, float]
    wasted: int


@attrs.frozen
class EngineStatus:
    """Engines of a run.

    Attributes:
        wanted: Number of engines that the run is to have.
        alive: Ranks of the engines that get requests.
        lost: Number of engines that died.
        refused: Reason why the number that was asked for is not granted; empty if it is.
    """

    wanted: int
    alive: tuple[int, ...]
    lost: int
    refused: str


@attrs.frozen
class RolloutSnapshot:
    """State of the rollouts at one moment, for a checkpoint.

    Attributes:
        state: Plain JSON, from which `Rollouts.restore` continues.
        waiting: Records of the groups that wait for the trainer.
    """

    state: Mapping[str, Any]
    waiting: tuple[TaskRecord, ...]


@attrs.frozen
class RolloutSummary:
    """Final account of the rollouts of a run.

    Attributes:
        sources: Counts of each source of tasks.
        environments: Environment workers that were lost, and what was run again because of it.
        engines: Number of engines that died, with the reasons.
        explorers_lost: Reasons why explorers in programs of their own ended before the run did.
        rollout_workers: Number of rollout workers that died, with the reasons.
    """

    sources: Mapping[str, TaskCounts]
    environments: Mapping[str, Any]
    engines: Mapping[str, Any]
    explorers_lost: tuple[str, ...] = ()
    rollout_workers: Mapping[str, Any] = attrs.field(factory=dict)


class WeightSender(Protocol):
    """Interface of a learner for the engines; called from threads."""

    def weights(self, version: int) -> Any:
        """Return an `ObjectRef` of the weights."""
        ...

    def canary(self, token_ids: np.ndarray) -> np.ndarray:
        """Return logprobs, float32 `[k - 1]`, of each token of `[k]` given those before it."""
        ...

    def checksums(self) -> dict[str, str]:
        """Return the CRC-32 of each tensor of the weights."""
        ...


class Rollouts(Protocol):
    """Interface through which a trainer gets its rollouts."""

    @property
    def eval_tasks(self) -> int:
        """Number of held-out tasks."""
        ...

    @property
    def failure(self) -> BaseException | None:
        """First error of a task that ran in the background."""
        ...

    async def take(self, version: int) -> TakenBatch:
        """Wait for the batch of a step, and return it; `version` counts the training steps done."""
        ...

    def settle(self, taken: TakenBatch, states: Sequence[TaskStatus]) -> None:
        """Close the records of a batch, each with a final status."""
        ...

    async def publish(self, learner: WeightSender, version: int, *, updated: bool) -> float:
        """Send new weights to the engines and compare both sides; returns the greatest gap in nats.

        Args:
            learner: Sender of the weights.
            version: Training steps done.
            updated: True if the weights must differ from those sent before.

        Raises:
            CanaryError: Engine and learner disagree.
            EngineError: An engine failed.
        """
        ...

    async def sleep(self) -> None:
        """Free the learner's device, where engines share it; the next `publish` or `take` wakes them."""
        ...

    async def evaluate(self) -> Evaluation:
        """Evaluate the engines' weights on the held-out tasks.

        Raises:
            ScoringError: A greater share than `max_invalid` of the answers could not be scored.
        """
        ...

    async def tasks(self, places: Mapping[int, tuple[str, int]]) -> dict[int, Task]:
        """Draw tasks again, without those of sources that are gone.

        Args:
            places: Number of a record -> source and position of its task.
        """
        ...

    async def restore(self, version: int, state: Mapping[str, Any], groups: Mapping[int, Group]) -> tuple[int, int]:
        """Continue from `snapshot().state`.

        Args:
            version: Training steps done.
            state: State of a snapshot.
            groups: Number of a record -> its group, of those that were kept; tasks of others run again.

        Returns:
            Number of groups that are there, and number of tasks that run again.
        """
        ...

    async def snapshot(self) -> RolloutSnapshot:
        """Return the state for a checkpoint."""
        ...

    async def counters(self) -> RolloutCounters:
        """Return seconds and tokens counted so far."""
        ...

    async def scale(self, engines: int | None) -> EngineStatus:
        """Begin to start or stop engines to reach this number, as far as there is room; None: no change."""
        ...

    def sources(self) -> Mapping[str, TaskCounts]:
        """Return the counts of each source of tasks."""
        ...

    async def pause(self) -> RolloutSummary:
        """End what runs in the background; the next `take` starts it again."""
        ...

    async def close(self) -> None:
        """End for good."""
        ...
