"""What the soak trains on: an environment, and a record of its own of which task ended in which step."""

import os
from pathlib import Path

import rlsdk

RECORD = os.environ.get("RLSDK_SOAK_RECORD", "")


@rlsdk.environment("digits")
class Digits:
    """Two turns; an answer with an odd number of digits has a reward."""

    def reset(self, seed: int) -> rlsdk.Observation:
        """Ask."""
        self.turns = 0
        return rlsdk.Observation(f"{seed % 20},5,17>9:")

    def step(self, text: str) -> rlsdk.Step:
        """Count."""
        self.turns += 1
        odd = sum(letter.isdigit() for letter in text) % 2
        return rlsdk.Step(rlsdk.Observation("go>1:"), float(odd), self.turns == 2)


@rlsdk.filter("noted")
def noted(group: rlsdk.Group) -> bool:
    """Keep every group, and write down that its task ends in this step."""
    _note(f"task {group.task.id}")
    return True


@rlsdk.hookimpl
def rlsdk_step_end(step: int) -> None:
    """Write down that a step has ended, behind its tasks."""
    _note(f"step {step}")


@rlsdk.hookimpl
def rlsdk_run_start() -> None:
    """Write down that a driver begins, at its beginning or at a resume."""
    _note("start")


def _note(line: str) -> None:
    with Path(RECORD).open("a", encoding="utf-8") as record:
        record.write(line + "\n")
