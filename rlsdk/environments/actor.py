"""The Ray actor of a worker: hosts environments, and says in plain values what became of each call."""

from __future__ import annotations

import asyncio
import logging
import os
import sys
from collections.abc import AsyncIterator, Awaitable, Mapping, Sequence
from typing import Any

import attrs

from rlsdk.cluster.actors import RunActor
from rlsdk.components import Isolation
from rlsdk.environments.host import EnvHost, EnvSpec
from rlsdk.errors import RlsdkError, WorldLostError
from rlsdk.isolation.process import settle
from rlsdk.plugins import ComponentRef

INTERVAL = 0.005
"""Seconds between two messages of answers, at least: a thousand environments cost a few messages, not thousands."""
FAILURES: dict[str, type[Exception]] = {
    each.__name__: each for each in (TimeoutError, RuntimeError, TypeError, WorldLostError)
}
"""What a call may end with, by name: an exception of foreign code need not survive the way."""


@attrs.frozen
class Reset:
    """Make an environment of a kind that the worker was told of, and start its episode."""

    number: int
    kind: int
    options: Mapping[str, Any]
    seed: int
    seconds: float


@attrs.frozen
class Act:
    """Take a step."""

    number: int
    text: str
    seconds: float


@attrs.frozen
class Leave:
    """Close an environment; nobody waits for it."""

    number: int


@attrs.frozen
class Learn:
    """Environments of this kind are made from that component."""

    kind: int
    reference: ComponentRef
    isolation: Isolation


Call = Reset | Act | Leave | Learn


@attrs.frozen
class Failed:
    """A failed call.

    Attributes:
        kind: Kind of failure, one of `FAILURES`.
        text: Description of the failure.
        stuck: Number of calls that currently hang in this worker.
    """

    kind: str
    text: str
    stuck: int


Answer = tuple[int, Any]
"""The number of an environment; `Observation`, `Step`, `Failed`, or an RlsdkError that ends the run."""


class EnvWorkerActor(RunActor):
    """Environments of many rollouts, in one process."""

    def __init__(self, threads: int, log_path: str) -> None:
        super().__init__(log_path)
        logging.basicConfig(stream=sys.stderr, level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
        self._host = EnvHost(threads)
        self._kinds: dict[int, EnvSpec] = {}
        self._running: set[asyncio.Task[None]] = set()
        self._ready: list[Answer] = []
        self._early: dict[int, Sequence[Call]] = {}
        self._due = 0
        self._some = asyncio.Event()
        settle()

    async def about(self) -> int:
        """The number of this process; whoever asks learns that it lives."""
        return os.getpid()

    async def take(self, serial: int, calls: Sequence[Call]) -> None:
        """Begin calls, message 0 first; what becomes of them comes out of `answers`.

        Ray may run the calls of an async actor in another order than they were made in.
        """
        self._early[serial] = calls
        while self._due in self._early:
            due = self._early.pop(self._due)
            self._due += 1
            self._begin(due)

    def _begin(self, calls: Sequence[Call]) -> None:
        for call in calls:
            if isinstance(call, Learn):
                self._kinds[call.kind] = EnvSpec(call.reference, call.isolation, call.kind)
            elif isinstance(call, Leave):
                self._host.close(call.number)
            else:
                task = asyncio.get_running_loop().create_task(self._run(call.number, self._begun(call)))
                self._running.add(task)
                task.add_done_callback(self._running.discard)

    async def answers(self) -> AsyncIterator[list[Answer]]:
        """Yield results of calls as they end (`num_returns="streaming"`), without end."""
        while True:
            await self._some.wait()
            self._some.clear()
            ready, self._ready = self._ready, []
            yield ready
            await asyncio.sleep(INTERVAL)

    def _begun(self, call: Reset | Act) -> Awaitable[Any]:
        if isinstance(call, Act):
            return self._host.step(call.number, call.text, call.seconds)
        return self._host.reset(call.number, self._kinds[call.kind], call.options, call.seed, call.seconds)

    async def _run(self, number: int, call: Awaitable[Any]) -> None:
        answer: Any
        try:
            answer = await call
        except tuple(FAILURES.values()) as error:
            kind = next(name for name, each in FAILURES.items() if isinstance(error, each))
            answer = Failed(kind, str(error), self._host.stuck)
        except RlsdkError as error:
            answer = error
        except Exception as error:  # not the environment's: its worker is broken
            logging.exception("a call failed")
            answer = Failed("WorldLostError", f"{type(error).__name__}: {error}", self._host.stuck)
        self._ready.append((number, answer))
        self._some.set()
