"""The Ray actor of an environment worker, and its messages with the driver: calls and their results."""

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
"""Minimum seconds between messages with answers, so that a thousand environments need few messages."""
FAILURES: dict[str, type[Exception]] = {
    each.__name__: each for each in (TimeoutError, RuntimeError, TypeError, WorldLostError)
}
"""Exceptions that may end a call, by name; exceptions of foreign code may not be picklable."""


@attrs.frozen
class Reset:
    """Create an environment of a registered kind, and start its episode."""

    number: int
    kind: int
    options: Mapping[str, Any]
    seed: int
    seconds: float


@attrs.frozen
class Act:
    """Pass a text to an environment as its action."""

    number: int
    text: str
    seconds: float


@attrs.frozen
class Close:
    """Close an environment; there is no answer."""

    number: int


@attrs.frozen
class Register:
    """Register a kind of environment under a number, for use in `Reset`."""

    kind: int
    reference: ComponentRef
    isolation: Isolation


Call = Reset | Act | Close | Register


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
"""Number of an environment, and an `Observation`, a `Step`, a `Failed`, or an RlsdkError that ends the run."""


class EnvWorkerActor(RunActor):
    """Hosts the environments of many rollouts in one process."""

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
        """Return the id of this process; any answer shows that it is alive."""
        return os.getpid()

    async def take(self, serial: int, calls: Sequence[Call]) -> None:
        """Start the calls of a message; `answers` yields their results.

        Args:
            serial: Number of the message, from 0; Ray may deliver messages out of order.
            calls: Calls, in order.
        """
        self._early[serial] = calls
        while self._due in self._early:
            due = self._early.pop(self._due)
            self._due += 1
            for call in due:
                self._start(call)

    def _start(self, call: Call) -> None:
        if isinstance(call, Register):
            self._kinds[call.kind] = EnvSpec(call.reference, call.isolation, call.kind)
            return
        if isinstance(call, Close):
            self._host.close(call.number)
            return
        if isinstance(call, Act):
            result: Awaitable[Any] = self._host.step(call.number, call.text, call.seconds)
        else:
            result = self._host.reset(call.number, self._kinds[call.kind], call.options, call.seed, call.seconds)
        task = asyncio.get_running_loop().create_task(self._run(call.number, result))
        self._running.add(task)
        task.add_done_callback(self._running.discard)

    async def answers(self) -> AsyncIterator[list[Answer]]:
        """Yield the results of calls as they end, forever (`num_returns="streaming"`)."""
        while True:
            await self._some.wait()
            self._some.clear()
            ready, self._ready = self._ready, []
            yield ready
            await asyncio.sleep(INTERVAL)

    async def _run(self, number: int, call: Awaitable[Any]) -> None:
        answer: Any
        try:
            answer = await call
        except tuple(FAILURES.values()) as error:
            kind = next(name for name, each in FAILURES.items() if isinstance(error, each))
            answer = Failed(kind, str(error), self._host.stuck)
        except RlsdkError as error:
            answer = error
        except Exception as error:  # not the environment's error: the worker is broken
            logging.exception("a call failed")
            answer = Failed("WorldLostError", f"{type(error).__name__}: {error}", self._host.stuck)
        self._ready.append((number, answer))
        self._some.set()
