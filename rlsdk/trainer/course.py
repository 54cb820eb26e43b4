"""The order of a step, whoever does its work and whatever the clock: take a batch, learn, settle, publish."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Generic, Protocol, TypeVar

import attrs

from rlsdk.config.production import ProductionSection
from rlsdk.rollout.lifecycle import State
from rlsdk.rollout.production import Pace
from rlsdk.rollout.staleness import expires_at

Batch = TypeVar("Batch")


class Clock:
    """Seconds per named phase of a step."""

    def __init__(self, now: Callable[[], float] = time.perf_counter) -> None:
        """Make one.

        Args:
            now: The time.
        """
        self._now = now
        self.seconds: dict[str, float] = {}

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        """Time a phase."""
        start = self._now()
        try:
            yield
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + self._now() - start


def pace_of(section: ProductionSection) -> Pace:
    """How far rollouts may run ahead, as a config says."""
    limit = expires_at(section.max_staleness, section.sync_interval)
    token = section.max_token_staleness
    return Pace(
        ahead=limit - 1,
        interval=section.sync_interval,
        limit=limit,
        oversample=section.oversample,
        token_limit=None if token is None else expires_at(token, section.sync_interval),
        tail=section.tail_batch,
    )


class Batches(Protocol[Batch]):
    """Where batches come from, as `rollout.production.Production` and `trainer.explorer.Explorer`."""

    async def take(self, step: int, /) -> Batch:
        """The batch of a step."""
        ...

    def settle(self, batch: Batch, states: Sequence[State], /) -> None:
        """Say what became of each ticket of a batch."""
        ...


@attrs.define(kw_only=True)
class Course(Generic[Batch]):
    """The steps of a run, one after the other.

    Attributes:
        production: Where batches come from.
        steps: How many there are.
        sync_interval: Steps between two syncs of weights; there is one after the last step, too.
        done: Steps that are behind.
    """

    production: Batches[Batch]
    steps: int
    sync_interval: int = 1
    done: int = 0

    async def step(
        self,
        clock: Clock,
        learn: Callable[[Batch], Awaitable[Sequence[State]]],
        publish: Callable[[], Awaitable[None]],
    ) -> None:
        """One step.

        Args:
            clock: Takes the times `take`, which is the waiting for rollouts, and `sync`.
            learn: Trains on a batch, and says what became of each of its tickets.
            publish: Sends the weights to the engines, whose version is then `done`.
        """
        with clock("take"):
            batch = await self.production.take(self.done)
        self.production.settle(batch, await learn(batch))
        self.done += 1
        if self.done % self.sync_interval == 0 or self.done == self.steps:
            with clock("sync"):
                await publish()
