"""A plugin of rlsdk in one file."""

from __future__ import annotations

import math
from typing import Annotated

import rlsdk


@rlsdk.lr_schedule("my_lr_schedule")
def my_lr_schedule(step: int, steps: int, *, cycles: Annotated[int, rlsdk.at_least(1)] = 4, low: float = 0.1) -> float:
    """Cosine decay that restarts several times.

    Args:
        step: Optimiser steps since the warm-up.
        steps: Optimiser steps of the run after the warm-up.
        cycles: Number of decays, of equal length.
        low: Value at the end of a decay.
    """
    progress = min(step / max(steps, 1), 1.0) * cycles % 1.0
    return low + (1 - low) * (1 + math.cos(math.pi * progress)) / 2
