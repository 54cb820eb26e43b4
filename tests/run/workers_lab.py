"""A hook that records each rollout, a reward that fails on some answers, and a workflow that rejects a task."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import rlsdk
from rlsdk.errors import DataError

COUNTDOWN = rlsdk.load("reward", "countdown")
FOLDER: list[Path] = []


@rlsdk.reward("touchy")
def touchy(rollout: rlsdk.Rollout) -> float:
    """Countdown, but raises on answers of an even length."""
    if len(rollout.response) % 2 == 0:
        raise ValueError("an even answer")
    return COUNTDOWN(rollout)


@rlsdk.workflow("refusing")
async def refusing(task: rlsdk.Task, chat: Any) -> rlsdk.Rollout:
    """Refuse every task."""
    raise DataError(f"the workflow cannot use {task.prompt[:3]!r}")


@rlsdk.hookimpl
def rlsdk_run_start(config: Any, folder: Path) -> None:
    FOLDER.append(Path(folder))


@rlsdk.hookimpl
def rlsdk_rollout_done(rollout: rlsdk.Rollout, score: rlsdk.Score, step: int) -> None:
    line = [step, rollout.task.id, rollout.token_ids.tolist(), rollout.status, score.valid, score.value]
    with (FOLDER[-1] / "seen.jsonl").open("a") as file:
        file.write(json.dumps([*line, rollout.policy_versions[rollout.loss_mask].tolist()]) + "\n")
