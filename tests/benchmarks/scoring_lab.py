"""A reward with a known cost, which hangs if the response says so."""

import time

import rlsdk


@rlsdk.reward("work")
def work(rollout, *, seconds: float = 0.005) -> float:
    """Spends CPU time, or all time there is.

    Args:
        seconds: Of CPU.
    """
    while rollout.response == "spin":
        pass
    while rollout.response == "sleep":
        time.sleep(1)
    end = time.process_time() + seconds
    while time.process_time() < end:
        pass
    return 1.0
