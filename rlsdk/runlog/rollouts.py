"""Saved rollouts: one parquet file per step under `rollouts/`, written beside the training, and single ones as JSON."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

from rlsdk.types import Group, Rollout, Score, Task


class RolloutWriter:
    """Writes groups in one thread of its own; a failure surfaces at the next write or at `close`."""

    def __init__(self, folder: Path, resumed_from: int) -> None:
        """Open the folder; on resume, files behind the step are removed."""
        self._folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        for old in folder.glob("step-*.parquet"):
            if int(old.stem.removeprefix("step-")) > resumed_from:
                old.unlink()
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="rollouts")
        self._pending: Future[None] | None = None

    def write(self, step: int, groups: Sequence[Group]) -> None:
        """Save the rollouts of a step."""
        self._wait()
        self._pending = self._pool.submit(self._write, self._folder / f"step-{step:06d}.parquet", step, list(groups))

    def close(self) -> None:
        """Wait for the last file."""
        self._wait()
        self._pool.shutdown()

    def _wait(self) -> None:
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.result()

    @staticmethod
    def _write(path: Path, step: int, groups: Sequence[Group]) -> None:
        import pyarrow
        import pyarrow.parquet

        rows = [_row(step, g, i) for g in groups for i in range(len(g))]
        partial = path.with_suffix(".partial")
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), partial)
        partial.rename(path)


def _row(step: int, group: Group, index: int) -> dict[str, Any]:
    rollout, score = group.rollouts[index], group.scores[index]
    return {
        "step": step,
        "task": group.task.id,
        "source": group.task.source,
        "index": index,
        "prompt": prompt_text(group.task),
        "response": rollout.response,
        "status": rollout.status,
        "reward": score.value if score.valid else None,
        "valid": score.valid,
        "reason": score.reason,
        "tokens": int(rollout.loss_mask.sum()),
    }


def prompt_text(task: Task) -> str:
    """A prompt as one text."""
    return task.prompt if isinstance(task.prompt, str) else "\n".join(f"{m.role}: {m.content}" for m in task.prompt)


def transcript(rollout: Rollout, score: Score) -> dict[str, Any]:
    """A rollout as JSON values: conversation, score, and every token with its mask."""
    return {
        "task": rollout.task.id,
        "source": rollout.task.source,
        "trajectory": rollout.trajectory,
        "step": rollout.step,
        "status": rollout.status,
        "reward": score.value if score.valid else None,
        "valid": score.valid,
        "reason": score.reason,
        "metrics": {**rollout.metrics, **score.metrics},
        "rewards": [list(pair) for pair in rollout.rewards],
        "messages": [
            {"role": m.role, "content": m.content, **({"name": m.name} if m.name else {})} for m in rollout.messages
        ],
        "token_ids": rollout.token_ids.tolist(),
        "loss_mask": rollout.loss_mask.tolist(),
        "logprobs": [float(value) for value in rollout.logprobs],
        "policy_versions": rollout.policy_versions.tolist(),
    }
