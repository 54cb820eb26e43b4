"""Training setup of the soak: an environment, and a separate record of the step in which each task ended."""

import os
import zlib
from pathlib import Path
from typing import Any

import rlsdk

RECORD = os.environ.get("RLSDK_SOAK_RECORD", "")


@rlsdk.environment("digits")
class Digits:
    """Two turns; half of all answers get a reward at random, which no policy can learn, so the run never runs dry."""

    def reset(self, seed: int) -> rlsdk.Observation:
        """Ask."""
        self.turns, self.seed = 0, seed
        return rlsdk.Observation(f"{seed % 20},5,17>9:")

    def step(self, text: str) -> rlsdk.Step:
        """Count."""
        self.turns += 1
        lucky = zlib.crc32(f"{self.seed} {text}".encode()) % 2
        return rlsdk.Step(rlsdk.Observation("go>1:"), float(lucky), self.turns == 2)


_begun = False


@rlsdk.filter("noted")
def noted(group: rlsdk.Group) -> bool:
    """Keep every group, and record that its task ends in this step, after the start of this driver."""
    global _begun  # noqa: PLW0603 - the module lives as long as its driver
    if group.task.id == "trial":  # tried before the start
        return True
    if not _begun:
        _begun = True
        _note("start")
    _note(f"task {group.task.id}")
    return True


@rlsdk.shaping("counted")
def counted(x: rlsdk.CreditInputs) -> Any:
    """Leave rewards unchanged, and record the step after its tasks."""
    _note(f"step {x.train_step + 1}")
    return x.rewards


def _note(line: str) -> None:
    with Path(RECORD).open("a", encoding="utf-8") as record:
        record.write(line + "\n")
