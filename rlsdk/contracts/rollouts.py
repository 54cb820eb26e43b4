"""Interface through which a trainer gets its rollouts, and the values exchanged with it.

`Rollouts` is implemented by `rlsdk.trainer.explorer.Explorer` in the trainer's process, by the proxy of an explorer
that runs as a separate program, and, in tests, by a script. All values are plain, so that they can be sent between
processes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import StrEnum
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import attrs

from rlsdk.errors import RunError, ScoringError

if TYPE_CHECKING:
    import numpy as np

    from rlsdk.contracts.generation import Completion, Sampling
    from rlsdk.types import Group, Task


class NoRolloutsError(RunError):
    """Raised if nothing makes rollouts any more; the run saves the steps that it has done."""


class UnscoredEvaluationError(ScoringError):
    """Raised if too many answers of an evaluation could not be scored; `evaluation` holds them."""

    def __init__(self, message: str, evaluation: Evaluation) -> None:
        self.message, self.evaluation = message, evaluation
        super().__init__(message)

    def __reduce__(self) -> tuple[type[UnscoredEvaluationError], tuple[str, Evaluation]]:
        return (UnscoredEvaluationError, (self.message, self.evaluation))


class TaskStatus(StrEnum):
    """Status of an issued task and of its group."""

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
    """An issued task without a final status.

    Attributes:
        number: Position in the order of issue.
        source: Name of the task's source.
        task: The task.
        position: Position in the source's stream, which checkpoints keep for unfinished tasks.
        state: Current status; only `TaskLedger.move` changes it.
        group: Sampled group, once complete; the part sampled so far if an aborted task runs again. Dropped when no
            longer needed.
        attempts: Number of times the task was started.
        taken: True once the trainer has taken the group; only its final status is then open.
        baseline: Reward of the greedy answer to the task, if it is needed and could be scored.
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
        target: Groups requested by the trainer.
        consumed: Groups taken by the trainer, whatever their final status.
        available: Groups ready for the trainer.
        scheduled: Running tasks.
        waiting: Issued, aborted or expired tasks; they are started before new ones.
        trained: Groups that were trained on.
        filtered: Groups that a filter dropped.
        failed: Tasks that gave no trainable group.
        expired: Groups that became too old to train on: their tasks are sampled again or, with a negative `tail`, also
            count as filtered.
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

    A value is None if none of its scores is valid: failed rewards do not count as zero.

    Attributes:
        accuracy: `greedy` (unless `eval.greedy` is false), `sampled`, and `pass@k` for each requested k, over the
            answers with a valid score.
        metrics: Accuracy, mean rewards, the number of unscored trajectories (`eval/invalid`) and the workflow's metrics
            of sampled answers, all under `eval/`; with several sources also per source, under `eval/SOURCE/`.
        samples: A few sampled answers for people to read.
        greedy: Groups of one greedy answer each, to be stored; empty if `eval.greedy` is false.
        sampled: Groups of sampled answers.
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
        greedy: Number of a record -> reward of the greedy answer to its task, if it is needed and could be scored.
        experts: Demonstrations of the same tasks, for algorithms that mix them in.
        metrics: Sampling metrics.
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
        clock: Seconds inside the engines, decode steps and tokens, as returned by `EngineGroup.clock`.
        wasted: Sampled tokens that were never trained on.
    """

    clock: Mapping[str, float]
    wasted: int


@attrs.frozen
class EngineStatus:
    """Engines of a run.

    Attributes:
        wanted: Target number of engines.
        alive: Ranks of the engines that receive requests.
        lost: Number of engines that died.
        refused: Reason why the last requested number was refused; empty if it was not.
    """

    wanted: int
    alive: tuple[int, ...]
    lost: int
    refused: str


@attrs.frozen
class RolloutSnapshot:
    """State of the rollouts at one point in time, for a checkpoint.

    Attributes:
        state: Plain JSON, from which `Rollouts.restore` continues.
        waiting: Records of the groups waiting for the trainer.
    """

    state: Mapping[str, Any]
    waiting: tuple[TaskRecord, ...]


@attrs.frozen
class RolloutSummary:
    """Final summary of a run's rollouts.

    Attributes:
        sources: Counts of each source of tasks.
        environments: Environment workers that were lost, and what was rerun because of it.
        engines: Number of engine deaths, with reasons.
        explorers_lost: Reasons why explorers that run as separate programs ended before the run did.
        rollout_workers: Number of rollout worker deaths, with reasons.
    """

    sources: Mapping[str, TaskCounts]
    environments: Mapping[str, Any]
    engines: Mapping[str, Any]
    explorers_lost: tuple[str, ...] = ()
    rollout_workers: Mapping[str, Any] = attrs.field(factory=dict)


class WeightSender(Protocol):
    """Interface through which engines get a learner's weights; called from threads.

    A sender that is `StreamsToEngines` may stream them instead.
    """

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
        """First error of a background task."""
        ...

    async def take(self, version: int) -> TakenBatch:
        """Wait for the batch of a step and return it; `version` is the number of training steps completed."""
        ...

    def settle(self, taken: TakenBatch, states: Sequence[TaskStatus]) -> None:
        """Close the records of a batch, each with a final status."""
        ...

    async def publish(self, learner: WeightSender, version: int, *, updated: bool) -> float:
        """Send new weights to the engines, compare engine and learner, and return the largest gap in nats.

        Args:
            learner: Sender of the weights.
            version: Number of training steps completed.
            updated: True if the weights must differ from the previous ones.

        Raises:
            CanaryError: Engine and learner disagree.
            EngineError: An engine failed.
        """
        ...

    async def sleep(self) -> None:
        """Free the learner's device if engines share it; the next `publish` wakes them."""
        ...

    async def evaluate(self) -> Evaluation:
        """Evaluate the engines' weights on the held-out tasks.

        Raises:
            UnscoredEvaluationError: The share of answers that could not be scored exceeds `max_invalid`.
        """
        ...

    async def tasks(self, places: Mapping[int, tuple[str, int]]) -> dict[int, Task]:
        """Draw tasks again, except those of removed sources.

        Args:
            places: Number of a record -> source and position of its task.
        """
        ...

    async def restore(self, version: int, state: Mapping[str, Any], groups: Mapping[int, Group]) -> tuple[int, int]:
        """Continue from `snapshot().state`.

        Args:
            version: Number of training steps completed.
            state: State of a snapshot.
            groups: Number of a record -> its saved group; tasks of other records run again.

        Returns:
            Number of restored groups, and number of tasks that run again.
        """
        ...

    async def snapshot(self) -> RolloutSnapshot:
        """Return the state for a checkpoint."""
        ...

    async def counters(self) -> RolloutCounters:
        """Return seconds and tokens counted so far."""
        ...

    async def scale(self, engines: int | None) -> EngineStatus:
        """Begin to start or stop engines to reach this number, as far as resources allow; None: no change."""
        ...

    def sources(self) -> Mapping[str, TaskCounts]:
        """Return the counts of each source of tasks."""
        ...

    async def pause(self) -> RolloutSummary:
        """Stop background work; the next `take` restarts it."""
        ...

    async def close(self) -> None:
        """Stop permanently."""
        ...


@runtime_checkable
class SamplesPrompts(Protocol):
    """Optional interface of rollouts whose engines a program may call by hand."""

    async def sample(
        self, prompts: Sequence[np.ndarray], sampling: Sampling | None, count: int, seed: int | None
    ) -> list[list[Completion]]:
        """Continue each prompt, int64 `[p]`, `count` times with the engines' current weights.

        Args:
            prompts: Token ids of each prompt.
            sampling: Sampling parameters; None for those of training.
            count: Number of continuations of each prompt.
            seed: Random seed of the continuations of each prompt; None for the engines' own.
        """
        ...
