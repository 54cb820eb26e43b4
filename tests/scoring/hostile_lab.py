"""Rewards that fail in every possible way; the text of the response says how."""

import asyncio
import ctypes
import os
import signal
import subprocess
import sys
import time

import rlsdk
from rlsdk.errors import DataError


def _do(text: str) -> float:
    kind, _, argument = text.partition(" ")
    if kind == "sleep":
        time.sleep(float(argument))
    elif kind == "spin":
        end = time.monotonic() + float(argument)
        while time.monotonic() < end:
            pass
    elif kind == "crash":
        ctypes.string_at(0)
    elif kind == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif kind == "exit":
        os._exit(3)
    elif kind == "leave":
        sys.exit(3)
    elif kind == "memory":
        return float(len(bytearray(1 << 36)))
    elif kind == "raise":
        raise ValueError(argument)
    elif kind == "task":
        raise DataError("the task has no answer")
    elif kind == "child":
        subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)", argument])
        time.sleep(600)
    elif kind == "fork" and os.fork() == 0:
        return -1.0  # as does its parent
    elif kind == "nan":
        return float("nan")
    elif kind == "huge":
        return 1e30
    elif kind == "words":
        return "ten"  # type: ignore[return-value]
    return float(len(text))


@rlsdk.reward("one")
def one(rollout) -> float:
    """The length of the response, if it is not hostile."""
    return _do(rollout.response)


@rlsdk.reward("cached", cache=True)
def cached(rollout) -> float:
    """Another number at each call."""
    return _do(rollout.response) + time.time()


@rlsdk.reward("many", batch=True)
def many(rollouts) -> list[float]:
    """The lengths of the responses."""
    return [_do(rollout.response) for rollout in rollouts]


@rlsdk.reward("pid")
def pid(rollout) -> float:
    """The process that scores."""
    return float(os.getpid())


@rlsdk.reward("computes")
def computes(rollout) -> float:
    """Computes until its process gives way to all others, which it does not do itself."""
    while os.getpriority(os.PRIO_PROCESS, 0) < 19:
        pass
    return 1.0


@rlsdk.reward("waits", runs="driver")
async def waits(rollout) -> float:
    """Waits as long as the response says, in the driver."""
    if rollout.response == "own":
        raise TimeoutError("a server is silent")
    if rollout.response == "leave":
        sys.exit(0)
    if rollout.response == "leaked":
        raise asyncio.CancelledError("of its own scope")
    await asyncio.sleep(float(rollout.response))
    return float(os.getpid())


@rlsdk.reward("in_turn")
async def in_turn(rollout, *, max_concurrency: int = 2) -> float:
    """Asks a server that takes its time; the number of calls that it answers at once."""
    in_turn.running = getattr(in_turn, "running", 0) + 1
    most = in_turn.running
    await asyncio.sleep(float(rollout.response))
    in_turn.running -= 1
    return float(most)


@rlsdk.reward("patient")
def patient(rollout, *, timeout: float = 1.0) -> float:
    """Waits as long as the response says, for at most `timeout`."""
    time.sleep(min(timeout, float(rollout.response)))
    return 1.0


@rlsdk.reward("too_few", batch=True)
def too_few(rollouts) -> list[float]:
    """One score too few."""
    return [1.0 for _ in rollouts][1:]
