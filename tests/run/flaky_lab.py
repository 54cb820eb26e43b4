"""A reward that fails on a share of the rollouts: it raises, hangs, or kills its process."""

import os
import random
import time

import rlsdk

COUNTDOWN = rlsdk.load("reward", "countdown")


@rlsdk.reward("flaky")
def flaky(rollout, *, share: float = 0.05) -> float:
    """Countdown, but not for every rollout; one that fails does so each time that it is scored.

    Args:
        share: Of the rollouts that fail, whatever they say.
    """
    draw = random.Random(f"{rollout.task.id} {rollout.token_ids.tolist()}")
    if draw.random() < share:
        kind = draw.choice(["raise", "hang", "end"])
        if kind == "end":
            os._exit(1)
        if kind == "hang":
            time.sleep(600)
        raise RuntimeError("the referee is ill")
    return COUNTDOWN(rollout)
