"""An environment that raises on some levels, hangs on one, and once kills its worker."""

import os
import time
from pathlib import Path

import rlsdk


@rlsdk.environment("moody")
class Moody:
    """Rewards an answer by its letters.

    Args:
        folder: Where it notes that it has taken its worker down.
    """

    def __init__(self, *, folder: str) -> None:
        self.mark = Path(folder) / "taken"

    def reset(self, seed: int) -> rlsdk.Observation:
        self.kind, self.steps = seed % 8, 0
        return rlsdk.Observation("3,5,17>9:")

    def step(self, text: str) -> rlsdk.Step:
        self.steps += 1
        if self.kind == 1:
            raise ValueError("the world is ill")
        if self.kind == 2:
            time.sleep(600)
        if self.kind == 3 and not self.mark.exists():
            self.mark.touch()
            os._exit(9)
        reward = sum(map(ord, text)) % 97 / 96  # two answers seldom get the same, so that a group teaches something
        return rlsdk.Step(rlsdk.Observation("go>1:"), reward, self.steps == 2, metrics={"success": float(reward > 0.5)})
