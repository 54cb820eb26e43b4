"""Final status of a step's groups, their entries in the rollout store, and the replay buffer."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import attrs
import numpy as np

from rlsdk.contracts.rollouts import TaskRecord, TaskStatus
from rlsdk.rollout.buffer import BufferPolicy, priority_of
from rlsdk.runlog.serialization import LEARNED, Learned
from rlsdk.runlog.tables import Entry
from rlsdk.types import Group

if TYPE_CHECKING:
    from rlsdk.rollout.step_batch import StepBatch


@attrs.define(kw_only=True, eq=False)
class ReplayedGroup:
    """A group that was trained on.

    Attributes:
        number: Number of its task record.
        source: Name of the source of its task.
        position: Position of its task in the stream of the source.
        step: Step that trained on it first.
        uses: Number of steps that trained on it.
        baseline: Reward of the greedy answer; None if no component reads it.
        group: The group as it was sampled, before filters.
    """

    number: int
    source: str
    position: int
    step: int
    group: Group
    uses: int = 1
    baseline: float | None = None


class ReplayBuffer:
    """Groups that may be trained on again, kept in memory, since none outlives the staleness limit."""

    def __init__(
        self, policy: BufferPolicy, *, count: int, most_uses: int, young: Callable[[Group, int], Group | None]
    ) -> None:
        """Create an empty buffer.

        Args:
            policy: Returns the priority of a group; None drops it.
            count: Number of groups that a step trains on again; 0 disables the buffer.
            most_uses: Maximum number of steps that train on a group.
            young: Returns the part of a group that is fresh enough for a step; None if there is none.
        """
        self._policy, self._count, self._most_uses, self._young = policy, count, most_uses, young
        self._held: list[ReplayedGroup] = []

    def draw(self, step: int) -> list[ReplayedGroup]:
        """Return the groups to train on again in a step, with this use counted; `add` counts it after the step."""
        unspent = [(used, self._young(used.group, step)) for used in self._held if used.uses < self._most_uses]
        fresh = [(used, young) for used, young in unspent if young is not None]
        self._held = [used for used, _ in fresh]
        asked = [(priority_of(self._policy, u.group, step=step, uses=u.uses), u, young) for u, young in fresh]
        ranked = sorted((-p, used.number, used, young) for p, used, young in asked if p is not None)
        return [attrs.evolve(used, group=young, uses=used.uses + 1) for *_, used, young in ranked[: self._count]]

    def add(self, trained: Sequence[ReplayedGroup], again: Sequence[ReplayedGroup] = ()) -> None:
        """Add groups that were trained on for the first time, and count the use of those that were drawn."""
        uses = {used.number: used.uses for used in again}
        for used in self._held:
            used.uses = uses.get(used.number, used.uses)
        if self._count:
            self._held += trained

    @property
    def held(self) -> Sequence[ReplayedGroup]:
        """All groups in the buffer."""
        return self._held

    def state(self) -> list[dict[str, Any]]:
        """Return the buffer without the groups themselves, as plain JSON."""
        return [{k: v for k, v in attrs.asdict(u, recurse=False).items() if k != "group"} for u in self._held]

    def places(self, state: Sequence[Mapping[str, Any]]) -> dict[int, tuple[str, int]]:
        """Map numbers to source and position of the tasks whose groups `restore` needs."""
        return {each["number"]: (each["source"], each["position"]) for each in state} if self._count else {}

    def restore(self, state: Sequence[Mapping[str, Any]], groups: Mapping[int, Group]) -> None:
        """Restore the buffer from `state()`; groups that are missing are not trained on again."""
        known = {each["number"]: each for each in state if each["number"] in groups and self._count}
        self._held = [ReplayedGroup(**known[n], group=groups[n]) for n in sorted(known)]


def final_statuses(records: Sequence[TaskRecord], batch: StepBatch | None) -> list[TaskStatus]:
    """Return the final status of each group in a batch; it is trained if one of its rollouts reached the learner."""
    trained = set() if batch is None else set(batch.uids[: batch.sampled])

    def status_of(record: TaskRecord) -> TaskStatus:
        if record.group is not None and record.group.uid in trained:
            return TaskStatus.TRAINED
        scored = record.group is not None and any(score.valid for score in record.group.scores)
        return TaskStatus.FILTERED if scored else TaskStatus.FAILED

    return [status_of(record) for record in records]


def newly_trained(
    records: Sequence[TaskRecord], statuses: Sequence[TaskStatus], step: int, baselines: Mapping[int, float]
) -> list[ReplayedGroup]:
    """Return the groups of a batch that a step trained on for the first time."""
    return [
        ReplayedGroup(
            number=record.number,
            source=record.source,
            position=record.position,
            step=step,
            group=record.group,
            baseline=baselines.get(record.number),
        )
        for record, status in zip(records, statuses, strict=True)
        if status is TaskStatus.TRAINED and record.group is not None
    ]


def entries_of(
    records: Sequence[TaskRecord], statuses: Sequence[TaskStatus], step: int, batch: StepBatch | None
) -> list[Entry]:
    """Return the store entries of a batch's groups after a step has settled them."""
    learned = {} if batch is None else learned_tokens(batch)
    return [
        Entry(
            number=record.number,
            source=record.source,
            state=status,
            step=step,
            uses=int(status is TaskStatus.TRAINED),
            group=record.group,
            learned=_learned_of(record.group, learned),
        )
        for record, status in zip(records, statuses, strict=True)
        if record.group is not None
    ]


def learned_tokens(batch: StepBatch) -> dict[int, dict[str, np.ndarray]]:
    """Return the learner's per-token arrays for each rollout of a step: `id` of the rollout -> name -> float32 `[T]`.

    Logprobs are left out if the learner used the engine's instead of computing its own.
    """
    tokens, offset = batch.arrays.tokens, 0
    old, given = tokens.get("old_logprobs"), tokens.get("behaviour_logprobs")
    fields = {"advantages": tokens.get("advantages"), "entropy": batch.fields.get("entropy")}
    if old is not None and given is not None and not np.array_equal(old, given):
        fields["learner_logprobs"] = old
    found: dict[int, dict[str, np.ndarray]] = {}
    spans = zip(batch.rollouts, batch.arrays.starts, batch.arrays.responses, strict=True)
    for rollout, start, length in spans:
        found[id(rollout)] = own = {}
        for name, values in fields.items():
            if values is not None:
                own[name] = np.zeros(len(rollout.token_ids), np.float32)
                own[name][start : start + length] = values[offset : offset + length]
        offset += int(length)
    return found


def _learned_of(group: Group, learned: Mapping[int, Mapping[str, np.ndarray]]) -> Learned:
    mine = [learned.get(id(rollout), {}) for rollout in group.rollouts]
    return {name: [each.get(name) for each in mine] for name in LEARNED if any(name in each for each in mine)}


def replayed_entry(used: ReplayedGroup, kept_at: int | None = None) -> Entry:
    """Return the store entry of a replayable group; `kept_at` is the step of the checkpoint that refers to it."""
    fields = {name: getattr(used, name) for name in ("number", "source", "step", "uses", "group")}
    return Entry(state=TaskStatus.TRAINED, kept_at=kept_at, **fields)


def waiting_entry(record: TaskRecord, kept_at: int) -> Entry:
    """Return the store entry of a group that waits for the trainer, for the checkpoint of step `kept_at`."""
    assert record.group is not None
    return Entry(
        number=record.number,
        source=record.source,
        state=record.state,
        step=None,
        uses=0,
        group=record.group,
        kept_at=kept_at,
    )
