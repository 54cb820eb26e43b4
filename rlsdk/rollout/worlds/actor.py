"""The Ray actor of a worker: hosts environments, and says in plain values what became of each call."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Awaitable, Mapping
from typing import Any

import attrs

from rlsdk.components import Isolation
from rlsdk.errors import WorldLostError
from rlsdk.plugins import Reference
from rlsdk.process import redirect, settle
from rlsdk.rollout.worlds.host import Blueprint, Host

FAILURES: dict[str, type[Exception]] = {
    each.__name__: each for each in (TimeoutError, RuntimeError, TypeError, WorldLostError)
}
"""What a call may end with, by name: an exception of foreign code need not survive the way."""


@attrs.frozen
class Failed:
    """A call that gave nothing.

    Attributes:
        kind: Which of `FAILURES`.
        text: What happened.
        stuck: Calls that hang in this worker by now.
    """

    kind: str
    text: str
    stuck: int


class WorldActor:
    """Environments of many rollouts, in one process."""

    def __init__(self, threads: int, log_path: str) -> None:
        if log_path:
            redirect(log_path)
        logging.basicConfig(stream=sys.stderr, level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
        self._host = Host(threads)
        self._blueprints: dict[int, Blueprint] = {}
        settle()

    async def about(self) -> int:
        """The number of this process; whoever asks learns that it lives."""
        return os.getpid()

    async def learn(self, key: int, reference: Reference, isolation: Isolation) -> None:
        """Environments of this key are made from that component."""
        self._blueprints.setdefault(key, Blueprint(reference, isolation))

    async def reset(self, number: int, key: int, options: Mapping[str, Any], seed: int, seconds: float) -> Any:
        """An `Observation` or `Failed`; another exception means that no environment of this component can be made."""
        return await self._outcome(self._host.reset(number, self._blueprints[key], options, seed, seconds))

    async def step(self, number: int, text: str, seconds: float) -> Any:
        """A `Step` or `Failed`."""
        return await self._outcome(self._host.step(number, text, seconds))

    async def leave(self, number: int) -> None:
        """Close an environment."""
        self._host.leave(number)

    async def _outcome(self, call: Awaitable[Any]) -> Any:
        try:
            return await call
        except tuple(FAILURES.values()) as error:
            kind = next(name for name, each in FAILURES.items() if isinstance(error, each))
            return Failed(kind, str(error), self._host.stuck)
