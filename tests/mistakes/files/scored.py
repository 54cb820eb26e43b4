"""Rewards that return something else than a number, or stop their process."""

import sys
import time

import rlsdk


@rlsdk.reward("nothing")
def nothing(rollout):
    """Forgets to return."""


@rlsdk.reward("words")
def words(rollout):
    """Gives text."""
    return "1.0"


@rlsdk.reward("nan")
def nan(rollout):
    """Gives no number."""
    return float("nan")


@rlsdk.reward("ends")
def ends(rollout):
    """Ends its process."""
    sys.exit(3)


@rlsdk.reward("short", batch=True)
def short(rollouts):
    """Gives one score, however many are asked for."""
    return [1.0]


@rlsdk.reward("later")
async def later(rollout):
    """A coroutine, which is awaited."""
    return 1.0


@rlsdk.reward("yes")
def yes(rollout):
    """A bool, which is a number."""
    return True


@rlsdk.reward("heavy")
def heavy(rollout):
    """Gives a tensor."""
    import torch

    return torch.tensor(1.0)


@rlsdk.reward("endless")
def endless(rollout):
    """Never returns."""
    while True:
        time.sleep(1)


@rlsdk.reward("relative", batch=True)
def relative(rollouts):
    """Compares what it was not promised to see together."""
    lengths = [len(rollout.response) for rollout in rollouts]
    return [sum(lengths) / len(lengths) - length for length in lengths]
