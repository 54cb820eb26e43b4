"""Environments that behave well, badly, and slowly, in a single-file plugin."""

from __future__ import annotations

import asyncio
import itertools
import os
import random
import re
import time
from pathlib import Path

import attrs

import rlsdk
from rlsdk.types import Observation, Step

TURNS = 3
INSIDE: set[int] = set()
"""Instances inside a call: state that all of a process share."""


_MADE = itertools.count()


def latencies(number: int, median: float, turns: int, sigma: float = 1.0) -> list[float]:
    """Seconds of `reset` and of each step: lognormal, so that the slowest of thousands takes forty times the median.

    Args:
        number: Of the environment.
        median: Of the seconds.
        turns: Steps.
        sigma: Of the logarithm.
    """
    drawn = random.Random(f"latency/{number}")
    return [median * drawn.lognormvariate(0.0, sigma) for _ in range(turns + 1)]


@attrs.define(kw_only=True)
class Plain:
    """Counts its steps, and does as the policy says.

    Attributes:
        folder: Where it leaves a note of each episode's beginning, and of its end.
    """

    folder: str = ""
    seed: int = attrs.field(init=False, default=-1)
    steps: int = attrs.field(init=False, default=0)

    def reset(self, seed: int) -> Observation:
        self.seed, self.steps = seed, 0
        self.note("reset")
        if seed == 666:
            raise ValueError("no such level")
        return Observation(f"{seed}:")

    def step(self, text: str) -> Step:
        self.steps += 1
        if text == "13":
            raise ValueError("unlucky")
        if text == "55":
            raise TimeoutError("a server is silent")
        if text == "99":
            time.sleep(60)
        if text == "88":
            re.match(r"(1+)+$", "1" * 60 + "2")  # minutes of C code that lets no other thread run
        if text == "77":
            os._exit(7)
        over = self.steps == TURNS
        return Step(Observation(f"{self.steps}:"), float(over), over, metrics={"pid": float(os.getpid())})

    def close(self) -> None:
        self.note("close")

    def note(self, what: str) -> None:
        if self.folder:
            (Path(self.folder) / f"{what}-{self.seed}-{os.getpid()}-{time.time_ns()}").touch()


@rlsdk.environment("plain")
@attrs.define(kw_only=True)
class InThreads(Plain):
    """In threads."""


@rlsdk.environment("apart", isolation="process")
@attrs.define(kw_only=True)
class InProcesses(Plain):
    """Each in a process of its own."""


@rlsdk.environment("locked", isolation="lock")
@attrs.define(kw_only=True)
class Locked(Plain):
    """Fails if another is inside a call at the same time."""

    def step(self, text: str) -> Step:
        if INSIDE:
            raise RuntimeError("another is inside")
        INSIDE.add(id(self))
        try:
            time.sleep(0.005)
            return super().step(text)
        finally:
            INSIDE.discard(id(self))


@attrs.define(kw_only=True)
class Slow:
    """Takes its time; the first that a worker makes has the latencies of number 0, and so on.

    Attributes:
        median: Of the latencies.
        turns: Steps of an episode.
    """

    median: float
    turns: int = 8
    left: list[float] = attrs.field(init=False, factory=list)

    def draw(self) -> float:
        self.left = latencies(next(_MADE), self.median, self.turns)
        return self.left.pop()

    def shown(self) -> Step:
        return Step(Observation("0:"), 1.0, not self.left)


@rlsdk.environment("sleeps")
@attrs.define(kw_only=True)
class Sleeps(Slow):
    """In a thread."""

    def reset(self, seed: int) -> Observation:
        time.sleep(self.draw())
        return Observation("0:")

    def step(self, text: str) -> Step:
        time.sleep(self.left.pop())
        return self.shown()


@rlsdk.environment("waits")
@attrs.define(kw_only=True)
class Waits(Slow):
    """On the event loop."""

    async def reset(self, seed: int) -> Observation:
        await asyncio.sleep(self.draw())
        return Observation("0:")

    async def step(self, text: str) -> Step:
        if text == "55":
            raise TimeoutError("a server is silent")
        await asyncio.sleep(60 if text == "99" else self.left.pop())
        return self.shown()
