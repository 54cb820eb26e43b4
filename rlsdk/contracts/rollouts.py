"""The source of a trainer's rollouts: its interface, and the values that pass between it and the trainer.

Three things implement `Rollouts`: `rlsdk.trainer.explorer.Explorer` in the trainer's own process, the proxy of an
explorer that runs as another program, and, in tests, a script. All values are plain, so that they can travel.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import attrs

if TYPE_CHECKING:
    import numpy as np

    from rlsdk.evaluation.evaluation import Evaluation
    from rlsdk.rollout.lifecycle import TaskCounts, TaskRecord, TaskStatus
    from rlsdk.types import Group, Task


@attrs.frozen(kw_only=True, eq=False)
class TakenBatch:
    """The groups of one training step, as the trainer takes them.

    Attributes:
        tickets: Records of the tasks, each with its group.
        greedy: Number of a ticket -> reward of the greedy answer to its task, where it is read and could be scored.
        experts: Demonstrations of the same tasks, for algorithms that mix them in.
        metrics: Metrics of the sampling.
    """

    tickets: tuple[TaskRecord, ...]
    greedy: Mapping[int, float] = attrs.field(factory=dict)
    experts: tuple[Group, ...] = ()
    metrics: Mapping[str, float] = attrs.field(factory=dict)

    @property
    def groups(self) -> list[Group]:
        """Groups of the tickets."""
        return [ticket.group for ticket in self.tickets if ticket.group is not None]


@attrs.frozen
class RolloutCounters:
    """Counts since the run began; none of them ever falls.

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
    """

    sources: Mapping[str, TaskCounts]
    environments: Mapping[str, Any]
    engines: Mapping[str, Any]
    explorers_lost: tuple[str, ...] = ()


class WeightSender(Protocol):
    """A learner as the engines see it; called from threads."""

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
    """Everything a trainer asks of what makes its rollouts."""

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
        """Close the records of a batch: one final state for each of its tickets."""
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
            places: Number of a ticket -> source and position of its task.
        """
        ...

    async def restore(self, version: int, state: Mapping[str, Any], groups: Mapping[int, Group]) -> tuple[int, int]:
        """Continue from `snapshot().state`.

        Args:
            version: Training steps done.
            state: State of a snapshot.
            groups: Number of a ticket -> its group, of those that were kept; tasks of others run again.

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
        """Begin to have this number of engines, as far as there is room, and return at once; None: no change."""
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
