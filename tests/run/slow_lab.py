"""An engine whose tokens take their time, so that answers are being sampled when weights change, and what they bore."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import attrs

import rlsdk
from rlsdk.engines.transformers import Transformers

FOLDER: list[Path] = []


@rlsdk.engine("slow")
@attrs.define(kw_only=True, eq=False, slots=False)
class Slow(Transformers):
    """The engine `transformers`, waiting before each step.

    Attributes:
        pace: Seconds.
    """

    pace: float = 0.06

    def step(self) -> Any:
        time.sleep(self.pace)
        return super().step()


@rlsdk.hookimpl
def rlsdk_run_start(config: Any, folder: Path) -> None:
    FOLDER.append(Path(folder))


@rlsdk.hookimpl
def rlsdk_rollout_done(rollout: rlsdk.Rollout, score: rlsdk.Score, step: int) -> None:
    if step > 0:
        versions = rollout.policy_versions[rollout.loss_mask].tolist()
        with (FOLDER[-1] / "versions.jsonl").open("a") as file:
            file.write(json.dumps([rollout.status, versions]) + "\n")
