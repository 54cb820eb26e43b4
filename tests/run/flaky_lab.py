"""A reward that fails on a share of the rollouts: it raises, hangs, or kills its process."""

import os
import random
import time

import rlsdk

COUNTDOWN = rlsdk.load("reward", "countdown")


@rlsdk.reward("flaky")
def flaky(rollout, *, share: float = 0.05) -> float:
    """Countdown, but not always.

    Args:
        share: Of the rollouts that fail, whatever they say.
    """
    draw = random.Random(os.urandom(8))  # forks share the state of the module's own generator
    if draw.random() < share:
        kind = draw.choice(["raise", "hang", "end"])
        if kind == "end":
            os._exit(1)
        if kind == "hang":
            time.sleep(600)
        raise RuntimeError("the referee is ill")
    return COUNTDOWN(rollout)
