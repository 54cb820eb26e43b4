"""Final status of a step's groups, and their store entries for viewers, checkpoints and replay."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from rlsdk.contracts.rollouts import TaskRecord, TaskStatus
from rlsdk.rollout.experience import ReplayedGroup
from rlsdk.runlog.payload import Learned
from rlsdk.runlog.tables import Entry
from rlsdk.types import Group

if TYPE_CHECKING:
    from rlsdk.rollout.step_batch import StepBatch


def final_states(records: Sequence[TaskRecord], batch: StepBatch | None) -> list[TaskStatus]:
    """Return the final status of each group in a batch; it is trained if one of its rollouts reached the learner."""
    trained = set() if batch is None else set(batch.uids[: batch.sampled])

    def end(record: TaskRecord) -> TaskStatus:
        if record.group is not None and record.group.uid in trained:
            return TaskStatus.TRAINED
        scored = record.group is not None and any(score.valid for score in record.group.scores)
        return TaskStatus.FILTERED if scored else TaskStatus.FAILED

    return [end(record) for record in records]


def used_of(
    records: Sequence[TaskRecord], ends: Sequence[TaskStatus], step: int, baselines: Mapping[int, float]
) -> list[ReplayedGroup]:
    """Return the groups of a batch that a step trained on for the first time."""
    return [
        ReplayedGroup(
            number=t.number,
            source=t.source,
            position=t.position,
            step=step,
            group=t.group,
            baseline=baselines.get(t.number),
        )
        for t, end in zip(records, ends, strict=True)
        if end is TaskStatus.TRAINED and t.group is not None
    ]


def entries_of(
    records: Sequence[TaskRecord], ends: Sequence[TaskStatus], step: int, batch: StepBatch | None = None
) -> list[Entry]:
    """Return the store entries of a batch's groups after a step has settled them.

    Args:
        records: Records of the tasks, each with its group.
        ends: Final status of each record.
        step: Step that settled them.
        batch: Rollouts that were trained on, with the learner's fields; None if there were none.
    """
    learned = {} if batch is None else learned_tokens(batch)
    return [
        Entry(
            number=t.number,
            source=t.source,
            state=end,
            step=step,
            uses=int(end is TaskStatus.TRAINED),
            group=t.group,
            learned=_learned_of(t.group, learned),
        )
        for t, end in zip(records, ends, strict=True)
        if t.group is not None
    ]


LEARNED = ("learner_logprobs", "advantages", "entropy")
"""Per-token arrays stored with a trained group; logprobs and entropy are the learner's before the update."""


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


def used_entry(used: ReplayedGroup, kept_at: int | None = None) -> Entry:
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
