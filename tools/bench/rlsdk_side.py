"""Plugin file of rlsdk's runs in `make bench-peers`: the exported tasks in their order, and the shared reward."""

from __future__ import annotations

import json
from pathlib import Path

import rlsdk
from rlsdk.kit import TaskList


@rlsdk.tasks("exported")
def exported(*, path: str, split: str = "train") -> TaskList:
    """Tasks of a JSONL file, trained in the file's order.

    Args:
        path: File whose lines contain `id`, `prompt`, `target` and `numbers`.
        split: Unused, since each split has its own file.
    """
    rows = [json.loads(line) for line in Path(path).read_text(encoding="utf-8").splitlines()]

    def make(index: int) -> rlsdk.Task:
        row = rows[index]
        return rlsdk.Task(
            id=row["id"], prompt=row["prompt"], answer={"target": row["target"], "numbers": row["numbers"]}
        )

    return TaskList(make, len(rows), ordered=True)


@rlsdk.reward("shared", runs="driver")
def shared(rollout: rlsdk.Rollout) -> float:
    """Return the same reward as the peer computes."""
    from shared_reward import countdown

    return countdown(rollout.response, rollout.task.answer["target"], rollout.task.answer["numbers"])
