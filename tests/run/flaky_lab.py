"""A reward that fails on a share of the rollouts: it raises, hangs, or takes its process down."""

import hashlib
import os
import time

import rlsdk


@rlsdk.reward("flaky")
def flaky(rollout, *, share: float = 0.05) -> float:
    """Countdown, but not always.

    Args:
        share: Of the rollouts that fail, drawn by what they say.
    """
    text = f"{rollout.task.id} {rollout.response}"
    draw = int.from_bytes(hashlib.sha256(text.encode()).digest()[:4], "big")
    if draw / 2**32 < share:
        kind = draw % 3
        if kind == 0:
            os._exit(1)
        if kind == 1:
            time.sleep(600)
        raise RuntimeError("the referee is ill")
    return rlsdk.load("reward", "countdown")(rollout)
