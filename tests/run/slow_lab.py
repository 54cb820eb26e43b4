"""An engine with slow tokens, so that weights change while answers are sampled, and a record of the results."""

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
