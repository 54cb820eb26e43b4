"""Rollouts with a given loss mask, for tests of packing."""

import numpy as np

from rlsdk.types import Rollout, Task

TASK = Task(id="t", prompt="p")


def rollout(prompt: int, mask: list[bool], first: int = 100) -> Rollout:
    """A rollout with `prompt` prompt tokens and a response masked as given."""
    total = prompt + len(mask)
    return Rollout(
        TASK,
        (),
        np.arange(first, first + total),
        [False] * prompt + mask,
        np.arange(total) * -0.1,
        [-1] * prompt + [0] * len(mask),
    )
